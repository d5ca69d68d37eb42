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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_name_is_on_the_page(path: Path) -> None:
    row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{path.stem}` |")), None)
    assert row is not None, f"docs/internals.md has no row for _torch/{path.name}"
    for name in private_names(path.read_text()):
        assert f"`{name.rpartition('.')[2]}`" in row, (
            f"docs/internals.md does not list {name} in the row of {path.stem}"
        )


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


OF_OBJECTS = {"_op", "_cdata", "_typed_storage", "_backward_hooks", "_forward_hooks", "_flat_weights"}
"""Private attributes of PyTorch's objects, which the walk by dotted names does not see. None is a name of ours."""


def test_nobody_else_uses_one_of_an_object() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in OTHERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS and ast.unparse(node.value) != "self"
    }
    assert found == set()
