"""What is known about an op is a field of its record in `ops/`: no other room keeps a table keyed by ops."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

import pytest
import torch
from torch._ops import OpOverload, OpOverloadPacket

import shardwise

PACKAGE = Path(shardwise.__file__).parent
NAME = re.compile(r"(aten|shardwise|prims)::\w+(\.\w+)?")
KEYED = {"dict", "set", "frozenset", "Mapping", "MutableMapping", "defaultdict", "WeakKeyDictionary", "Dict", "Set"}
OP_TYPES = {"OpOverload", "OpOverloadPacket"}
CACHES = {"cache", "lru_cache"}
OTHER_WORDS = {"sum", "avg", "mean", "max", "min", "product", "prod", "cpu", "cuda"}
"""Names of ops that have another meaning, too: reductions of placements, losses and collectives, and devices."""
MODULES = {"torch": torch, "Tensor": torch.Tensor, "F": torch.nn.functional, "aten": torch.ops.aten}


def is_op(node: ast.expr | None) -> bool:
    """Whether an expression is an op: `"aten::mm"`, `aten.mm.default`, `torch.ops.aten.mm`."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and NAME.fullmatch(node.value) is not None
    return isinstance(node, ast.Attribute) and re.match(r"(torch\.ops\.\w+|aten)\.\w+", ast.unparse(node)) is not None


def is_function(node: ast.expr | None) -> bool:
    """Whether an expression is a function of PyTorch: `torch.cat`, `Tensor.view`, `getattr(torch, name)`."""
    if isinstance(node, ast.Attribute) and node.attr == "__get__":  # of an attribute of tensors
        return is_function(node.value) or ast.unparse(node.value).startswith(("torch.Tensor", "Tensor"))
    if isinstance(node, ast.Call):
        first = ast.unparse(node.args[0]) if node.args else ""
        return ast.unparse(node.func) == "getattr" and (first in MODULES or first == "torch.Tensor")
    if not isinstance(node, ast.Attribute):
        return False
    root, *path = ast.unparse(node).split(".")
    found: object = MODULES.get(root)
    for name in path:
        found = getattr(found, name, None)
    return callable(found) and not isinstance(found, type) and found is not torch.device


def is_bare_name(node: ast.expr | None) -> bool:
    """Whether an expression is the name of an op without its namespace: `"unsqueeze"`."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and hasattr(torch.ops.aten, node.value)


def are_keys(nodes: list[ast.expr | None]) -> bool:
    """Whether keys of a dict, or elements of a set, are ops, functions of PyTorch, or, all of them, names of ops."""
    if any(is_op(node) or is_function(node) for node in nodes):
        return True
    words = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return len(nodes) > 1 and all(map(is_bare_name, nodes)) and not words <= OTHER_WORDS


def elements(node: ast.expr) -> list[ast.expr | None]:
    """The elements of a tuple, a list, a set or a generator, those of starred ones included."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [inner for each in node.elts for inner in elements(each)]
    if isinstance(node, ast.Starred):
        return elements(node.value)
    return [node.elt] if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)) else [node]


def keys_of(node: ast.AST) -> list[ast.expr | None]:
    """The keys of what makes a dict or a set, or stores in a dict."""
    if isinstance(node, ast.Dict):
        return list(node.keys)
    if isinstance(node, (ast.Set, ast.SetComp)):
        return elements(node)
    if isinstance(node, ast.DictComp):
        return [node.key]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return [node.slice]
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in ("set", "frozenset", "dict.fromkeys"):
        return elements(node.args[0])
    return []


def mentions_op(annotation: ast.expr | None) -> bool:
    return annotation is not None and bool(OP_TYPES & set(re.findall(r"\w+", ast.unparse(annotation))))


def keyed_by_op(annotation: ast.expr) -> bool:
    """Whether a type is a dict or set whose keys are ops or functions, anywhere in it."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in KEYED:
            key = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            if OP_TYPES & {part.strip() for part in ast.unparse(key).split("|")}:
                return True
            if ast.unparse(node.value) in ("dict", "Mapping") and ast.unparse(key).startswith("Callable"):
                return True
    return False


def looks_up_by_op(function: ast.FunctionDef) -> bool:
    """Whether a function of an op is cached, stores something under the op, or looks a function up by the op's name."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    ops = {argument.arg for argument in arguments if mentions_op(argument.annotation)}
    if not ops:
        return False
    decorators = {word for each in function.decorator_list for word in re.findall(r"\w+", ast.unparse(each))}
    if decorators & CACHES and len(arguments) == 1:
        return True
    keys = ops | {f"id({op})" for op in ops}
    for node in ast.walk(function):
        stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node.slice) in keys:
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            place, name = node.args[:2]
            if isinstance(place, ast.Name) and isinstance(name, ast.Name):
                return True
    return False


def tables(source: str) -> Iterator[tuple[str, int]]:
    """The name and the line of every table of ops in a module; the name is empty where it is assigned to none."""
    names: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            target = target.value if isinstance(target, ast.Subscript) else target
            names |= {id(inner): ast.unparse(target) for inner in ast.walk(node)}
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        found = isinstance(annotation, ast.expr) and keyed_by_op(annotation)
        found |= are_keys(keys_of(node))
        found |= isinstance(node, (ast.List, ast.Tuple)) and sum(map(is_op, node.elts)) >= 3
        if isinstance(node, ast.FunctionDef) and looks_up_by_op(node):
            names[id(node)], found = node.name, True
        if found:
            yield names.get(id(node), ""), node.lineno


ELSEWHERE = {
    "testing self._keys": "the calls that one run of the verifier has tried: a log, no facts about ops",
    "random _MAKERS": "distributions, named as the methods that fill a tensor; Op.draw says which op draws which",
    "random _DERIVED": "the same: distributions that are computed from the numbers of another one",
    "hub _NAMED": "functions that a tensor class of its own implements (__torch_function__); it never meets dispatch",
    "hub _FUNCTIONS": "the same, with the functions themselves as keys",
    "hub _METADATA": "the same: those that this class leaves to PyTorch",
}
"""What looks like a table in another folder, and why it is none. One listed here that is gone is an error."""


def test_no_other_room_has_a_table_of_ops() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "ops"]
    assert len(modules) > 80
    found: dict[str, str] = {}
    for path in modules:
        for name, line in tables(path.read_text()):
            where = path.relative_to(PACKAGE)
            found[f"{where.parts[0]} {name}"] = f"{where}:{line}: {name}"
    new = [text for key, text in found.items() if key not in ELSEWHERE]
    assert not new, "make these fields of records in ops/:\n" + "\n".join(sorted(new))
    assert set(found) == set(ELSEWHERE), "delete from this list what is gone"


def containers(owner: object) -> Iterator[tuple[str, object]]:
    """The containers that a module, and the classes defined in it, hold."""
    for name, value in vars(owner).items():
        if isinstance(value, (dict, set, frozenset, list, tuple, WeakKeyDictionary)) and not name.startswith("__"):
            yield name, value
        elif isinstance(owner, ModuleType) and isinstance(value, type) and value.__module__ == owner.__name__:
            yield from ((f"{name}.{inner}", found) for inner, found in containers(value))


def held_tables(modules: dict[str, ModuleType]) -> Iterator[str]:
    """The names of containers of three or more ops, or of keys that are ops, that are not those of a module in ops/."""
    owned = {id(value) for name, module in modules.items() if ".ops." in name for _, value in containers(module)}
    for where, module in modules.items():
        for name, value in containers(module):
            ops = sum(isinstance(key, (OpOverload, OpOverloadPacket)) for key in value)  # type: ignore[attr-defined]
            if id(value) not in owned and ops >= (3 if isinstance(value, (list, tuple)) else 1):
                yield f"{where}.{name}"


def test_no_other_room_holds_a_table_of_ops() -> None:
    """Tables whose keys are variables, or made by a function, are found where they are held."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        if path.stem != "__main__":
            with suppress(ImportError):  # of Triton, which is not everywhere
                found[name] = importlib.import_module(name)
    assert len(found) > 400
    assert not list(held_tables(found)), "make these fields of records, or sets in ops/"


def test_a_table_is_found_where_it_is_held() -> None:
    module = ModuleType("shardwise.elsewhere")
    module.table, module.pair = frozenset([torch.ops.aten.mm.default]), (torch.ops.aten.mm, torch.ops.aten.bmm)
    assert list(held_tables({module.__name__: module})) == ["shardwise.elsewhere.table"]
    owner = ModuleType("shardwise.ops.somewhere")
    owner.table = module.table
    assert not list(held_tables({module.__name__: module, owner.__name__: owner}))


@pytest.mark.parametrize(
    "source",
    [
        "table: dict[OpOverload, int] = {}",
        "class A:\n    seen: set[OpOverload | str]",
        "def f(x: Mapping[OpOverloadPacket, str]) -> None: ...",
        "def f() -> dict[OpOverload, int]: ...",
        "table = {'aten::mm': 1, 'aten::add.Tensor': 2}",
        "table = {aten.mm.default: 1}",
        "table = {torch.ops.aten.mm.default, other}",
        "if func in (aten.mm.default, aten.bmm.default, aten.addmm.default): ...",
        "names = frozenset(['aten::mm', 'aten::bmm', 'aten::addmm'])",
        "@cache\ndef f(func: OpOverload) -> int: ...",
        "@functools.lru_cache(maxsize=9)\ndef f(func: OpOverload | None) -> int: ...",
        "def f(func: OpOverload) -> int:\n    table[func] = 1",
        "def f(func: OpOverload) -> int:\n    table[id(func)] = 1",
        "def f(func: OpOverload) -> object:\n    return getattr(module, name)",
        "table = {'narrow': f, 'unsqueeze': g}",
        "table = {'uniform_', 'normal_'}",
        "table = frozenset(('uniform_', 'normal_'))",
        "table = {torch.stack: f}",
        "table = {torch.Tensor.view, torch.Tensor.reshape}",
        "table = dict.fromkeys((torch.cat, torch.concat), f)",
        "table = {getattr(Tensor, name) for name in names}",
        "table = {*(getattr(torch.Tensor, name).__get__ for name in names)}",
        "table[getattr(torch, name)] = f",
        "table: dict[Callable[..., object], int] = {}",
    ],
)
def test_a_table_is_found(source: str) -> None:
    assert list(tables(source))


@pytest.mark.parametrize(
    "source",
    [
        "def f(func: OpOverload) -> dict[str, OpOverload]: ...",
        "plans: dict[tuple[OpOverload, int], str] = {}",
        "pair = (aten.mm.default, aten.bmm.default)",
        "call(aten.mm.default, x, y)",
        "table = {'mm': aten.mm.default}",
        "text = 'aten::mm is an op'",
        "names = ['shardwise', 'aten', 'prims']",
        "def f(func: OpOverload) -> str:\n    return getattr(func, 'name')",
        "@cache\ndef f(text: str) -> OpOverload: ...",
        "table = {'sum': f, 'max': g, 'min': h}",
        "table = {'size': 1, 'path': 2}",
        "table = {torch.float32: 1, torch.bool: 2}",
        "table = {torch.Tensor, torch.Size}",
    ],
)
def test_what_is_no_table_is_not_found(source: str) -> None:
    assert not list(tables(source))
