"""What benchmarks and examples import of shardwise exists: no other test runs most of them."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> list[tuple[str, str]]:
    """The modules of shardwise that a script imports from, and the names that it imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = [(node.module or "", node.names) for node in nodes if not node.level]
    return [(module, name.name) for module, names in modules if module.split(".")[0] == "shardwise" for name in names]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_names_exist(path: Path) -> None:
    for module, name in imported(path):
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"


def test_names_are_found() -> None:
    found = [pair for path in SCRIPTS for pair in imported(path)]
    assert ("shardwise.comm.planner", "make_plan") in found
