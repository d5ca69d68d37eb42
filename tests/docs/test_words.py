"""Docstrings of functions say what the function does, and words that meant several things stay away."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "shardwise").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# What these functions return is named by their docstrings: statements of random programs, hypothesis strategies.
NAMED = ("statements", "strategies.py")


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, str]]:
    """The functions with a docstring that are no properties, and the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any("property" in text or text.endswith(".setter") for text in decorators):
                yield node, text


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for path in SOURCES
        if not any(part in NAMED for part in path.parts)
        for node, text in functions(ast.parse(path.read_text()))
        if re.match(r"(The|A|An|Whether|Inside|This|These|Which|How|Does)\b", text)
    ]
    assert not found, "\n".join(found)


def test_first_lines_are_one_sentence_on_one_line() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node, text in functions(ast.parse(path.read_text()))
        if not text.splitlines()[0].rstrip("`").endswith((".", ":", "?", "...", '"')) and "\n" in text
    ]
    assert not found, "\n".join(found)


def test_words_with_several_meanings_stay_away() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*SOURCES, *PAGES]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"\b(whole|wholly|spoken of)\b", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
