"""What is known about an op is a field of its record in `ops/`: no other room keeps a table keyed by ops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise

PACKAGE = Path(shardwise.__file__).parent
NAME = re.compile(r"(aten|shardwise|prims)::\w+(\.\w+)?")
KEYED = {"dict", "set", "frozenset", "Mapping", "MutableMapping", "defaultdict", "WeakKeyDictionary", "Dict", "Set"}
OP_TYPES = {"OpOverload", "OpOverloadPacket"}


def is_op(node: ast.expr | None) -> bool:
    """Whether an expression is an op: `"aten::mm"`, `aten.mm.default`, `torch.ops.aten.mm`."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and NAME.fullmatch(node.value) is not None
    return isinstance(node, ast.Attribute) and re.match(r"(torch\.ops\.\w+|aten)\.\w+", ast.unparse(node)) is not None


def keyed_by_op(annotation: ast.expr) -> bool:
    """Whether a type is a dict or set whose keys are ops, anywhere in it."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] in KEYED:
            key = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            if OP_TYPES & {part.strip() for part in ast.unparse(key).split("|")}:
                return True
    return False


def tables(source: str) -> Iterator[tuple[str, int]]:
    """The name and the line of every table of ops in a module; the name is empty where it is assigned to none."""
    names: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names |= {id(inner): ast.unparse(target) for inner in ast.walk(node)}
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        found = isinstance(annotation, ast.expr) and keyed_by_op(annotation)
        found |= isinstance(node, ast.Dict) and any(map(is_op, node.keys))
        found |= isinstance(node, ast.Set) and any(map(is_op, node.elts))
        found |= isinstance(node, (ast.List, ast.Tuple)) and sum(map(is_op, node.elts)) >= 3
        if found:
            yield names.get(id(node), ""), node.lineno


ELSEWHERE = {
    "testing self._keys": "the calls that one run of the verifier has tried: a log, no facts about ops",
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
    ],
)
def test_what_is_no_table_is_not_found(source: str) -> None:
    assert not list(tables(source))
