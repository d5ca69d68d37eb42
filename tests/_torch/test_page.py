"""docs/internals.md lists the private names of PyTorch that are used, and the tests that guard them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"
MODULES = sorted(path for path in (PACKAGE / "_torch").glob("*.py") if path.name != "__init__.py")
PAGE = (ROOT / "docs" / "internals.md").read_text()
PRIVATE = re.compile(r"(^|\.)_[a-zA-Z]")


def private_names(source: str) -> set[str]:
    r"""The private names of PyTorch in a module: those it imports, and attributes of torch's modules.

    >>> private_names("import torch\\nfrom torch._ops import OpOverload\\nmake = torch.Tensor._make_wrapper_subclass")
    {'torch._ops.OpOverload', 'torch.Tensor._make_wrapper_subclass'}
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        if isinstance(node, ast.Attribute):
            found.add(".".join(_dotted(node)))
    found = {name for name in found if name.split(".")[0] in ("torch", "dist", "c10d") and PRIVATE.search(name)}
    # Ops have public schemas, whatever their names; module and class docstrings and versions are public, too.
    found = {name for name in found if not name.startswith("torch.ops.aten.") and "__" not in name}
    return {name for name in found if not any(other.startswith(name + ".") for other in found)}


def _dotted(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield from _dotted(node.value)
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id


def test_the_walk_finds_private_names() -> None:
    source = "import torch\nfrom torch._ops import OpOverload\nx = torch._C._nn.linear\ny = torch.ops.aten._softmax"
    assert private_names(source) == {"torch._ops.OpOverload", "torch._C._nn.linear"}
    assert private_names("import torch\nfrom torch import Tensor\nx = torch.nn.Linear") == set()


def row_of(path: Path) -> list[str]:
    """The columns of a module's row: the module, its names, what for, the test."""
    row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{path.stem}` |")), None)
    assert row is not None, f"docs/internals.md has no row for _torch/{path.name}"
    return row.strip("| ").split(" | ")


def private_parts(source: str) -> set[str]:
    """The private modules and names on the way to the names of PyTorch that a module uses, without `torch._C`."""
    return {part for name in private_names(source) for part in name.split(".") if re.match("_[a-z]", part)}


def test_the_walk_finds_private_modules() -> None:
    source = "from torch.utils._pytree import tree_map\nimport torch._ops\nx = torch._C._nn.linear"
    assert private_parts(source) == {"_pytree", "_ops", "_nn"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_name_is_on_the_page(path: Path) -> None:
    names = row_of(path)[1]
    for name in {name.rpartition(".")[2] for name in private_names(path.read_text())} | private_parts(path.read_text()):
        assert f"`{name}`" in names, f"docs/internals.md does not list {name} in the row of {path.stem}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_attribute_and_text_is_on_the_page(path: Path) -> None:
    tree = ast.parse(path.read_text())
    ours = {name for each in MODULES for name in our_names(ast.parse(each.read_text()))}
    attributes = {node.attr for node in private_attributes(tree, ours - OF_OBJECTS)}
    texts = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
    }
    texts = {text for text in texts if isinstance(text, str) and re.fullmatch(r"_[a-z]\w*", text) and text != "_fields"}
    for name in attributes | texts:
        assert f"`{name}`" in row_of(path)[1], f"docs/internals.md does not list {name} in the row of {path.stem}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_name_on_the_page_is_used(path: Path) -> None:
    source = path.read_text()
    for name in re.findall(r"`(\w+)`", row_of(path)[1]):
        assert re.search(rf"\b{name}\b", source), f"docs/internals.md lists {name}, which {path.stem} does not use"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_module_has_a_test(path: Path) -> None:
    test = ROOT / "tests" / "_torch" / f"test_{path.stem}.py"
    assert test.exists(), f"_torch/{path.name} has no test"
    assert (
        f"shardwise._torch.{path.stem} import" in test.read_text() or f"_torch import {path.stem}" in test.read_text()
    )
    assert f"test_{path.stem}.py" in PAGE


OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if "_torch" not in path.parts and path.name != "interop.py")


def test_nobody_else_uses_one() -> None:
    used = {str(path.relative_to(PACKAGE)): private_names(path.read_text()) for path in OTHERS}
    assert {path: names for path, names in used.items() if names} == {}


NOT_OF_TORCH = {
    *("_asdict", "_fields", "_replace"),  # named tuples
    *("_getframe", "_current_frames", "_exit"),  # sys and os
    *("_from_config", "_get_dtype_plan"),  # transformers
}
JUSTIFIED = {"_version", "_base"}
"""Attributes of tensors that PyTorch's documentation mentions: docs/internals.md says what they are used for."""
OF_OBJECTS = {
    *("_op", "_schema", "_overloadname", "_qualified_op_name", "_parameters", "_buffers", "_modules"),
    *("_cdata", "_typed_storage", "_backward_hooks", "_forward_hooks", "_flat_weights"),
}
"""Private attributes of PyTorch's objects, of which some are also names of ours."""


def our_names(tree: ast.AST) -> Iterator[str]:
    """Every name that a module defines or assigns: functions, classes, variables, attributes, arguments, slots."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)


def private_attributes(tree: ast.AST, ours: set[str]) -> Iterator[ast.Attribute]:
    """Private attributes of objects that are not ours; methods of ours may use any attribute of `self`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not re.match("_[a-z]", node.attr):
            continue
        if ast.unparse(node.value) in ("self", "cls") or re.match(r"(torch\.ops|_?aten)\b", ast.unparse(node)):
            continue
        if node.attr in OF_OBJECTS or node.attr not in ours | NOT_OF_TORCH | JUSTIFIED:
            yield node


def test_the_walk_finds_private_attributes() -> None:
    source = "a._schema\nb._ours\nc._new_in_torch\nself._anything\naten._softmax.default\nd._version"
    found = private_attributes(ast.parse(source), {"_ours", "_schema"})
    assert [ast.unparse(node) for node in found] == ["a._schema", "c._new_in_torch"]


def test_nobody_else_uses_one_of_an_object() -> None:
    trees = {path: ast.parse(path.read_text()) for path in OTHERS}
    ours = {name for tree in trees.values() for name in our_names(tree)}
    found = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in private_attributes(tree, ours)
    }
    assert found == set()
