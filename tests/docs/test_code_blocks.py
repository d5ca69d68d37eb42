"""The code in README.md and docs/ runs, and prints what the page says it prints.

All the ```python blocks of a page run in order, in one namespace. A block fenced as

    ```python no-run      is skipped;
    ```text output        must equal what the python block before it printed.

A failure names the page and the line.
"""

import contextlib
import difflib
import io
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from shardwise.world.registry import active
from shardwise.world.simulate import SimulatedWorld

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/*.md")])
FENCE = re.compile(r"\s*(?P<ticks>`{3,})\s*(?P<info>[^`]*)")


@dataclass(frozen=True)
class Block:
    info: str
    line: int  # of the opening fence, counted from 1
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    lines = enumerate(page.read_text().splitlines(), start=1)
    for number, line in lines:
        if opening := FENCE.fullmatch(line):
            body: list[str] = []
            for _, inner in lines:
                closing = FENCE.fullmatch(inner)
                if closing and not closing["info"] and len(closing["ticks"]) >= len(opening["ticks"]):
                    break
                body.append(inner)
            else:
                pytest.fail(f"{page}:{number}: this block is never closed", pytrace=False)
            yield Block(" ".join(opening["info"].split()), number, dedent("\n".join(body)))


def run_page(page: Path) -> None:
    """Run a page's python blocks and compare what they print with its output blocks."""
    # A module of its own, so that classes and functions made on the page know where they live.
    module = types.ModuleType(f"page_{page.stem}")
    printed: str | None = None
    with pytest.MonkeyPatch.context() as patch, ending_worlds():
        patch.setitem(sys.modules, module.__name__, module)
        for block in blocks(page):
            if block.info == "python":
                printed = run_block(page, block, module)
            elif block.info == "python no-run":
                printed = None
            elif block.info == "text output":
                compare(page, block, printed)
            elif block.info.startswith(("python ", "text ")):
                pytest.fail(f"{page}:{block.line}: unknown kind of block: {block.info!r}", pytrace=False)


@contextlib.contextmanager
def ending_worlds() -> Iterator[None]:
    """Stop the simulated worlds that a page has started and not stopped, as a page does that fails."""
    before = len(active)
    try:
        yield
    finally:
        for world in reversed(active[before:]):
            assert isinstance(world, SimulatedWorld)
            world.stop()


def run_block(page: Path, block: Block, module: types.ModuleType) -> str:
    """Run one block; return what it printed."""
    out = io.StringIO()
    # The blank lines in front make tracebacks and inspect.getsource point into the page.
    source = "\n" * block.line + block.text
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(source, str(page), "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        where = f"{page}:{failing_line(error, page, block)}"
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return out.getvalue()


def failing_line(error: Exception, page: Path, block: Block) -> int:
    """The page's line that raised: the innermost one of the traceback that lies on the page."""
    if isinstance(error, SyntaxError) and error.filename == str(page):
        return error.lineno or block.line
    line, traceback = block.line, error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename == str(page):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def compare(page: Path, block: Block, printed: str | None) -> None:
    """Fail, with a diff, unless the page shows what was printed (spaces at line ends aside)."""
    if printed is None:
        pytest.fail(f"{page}:{block.line}: no python block ran before this output", pytrace=False)
    shown, actual = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (block.text, printed))
    if shown != actual:
        diff = "\n".join(difflib.unified_diff(shown, actual, "on the page", "printed", lineterm=""))
        pytest.fail(f"{page}:{block.line}: the output differs\n{diff}", pytrace=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path) -> None:
    run_page(page)


RIGHT = """\
# A page

```python
from dataclasses import dataclass

@dataclass
class Point:
    x: int
```
Prose, and another block that goes on from the first.

- in a list
  ```python
  print(Point(1))
  ```
  ```text output
  Point(x=1)
  ```

```python no-run
raise SystemExit
```
````text
```python
this is shown, not run
```
````
"""


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_a_right_page_passes(tmp_path: Path) -> None:
    run_page(page_of(tmp_path, RIGHT))


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("x=1)\n", "x=2)\n", r"page.md:16: the output differs\n(.*\n)*-Point\(x=2\)\n\+Point\(x=1\)"),
        ("print(Point(1))", "pass", r"page.md:16: the output differs"),
        ("print(Point(1))", "print(Point())", r"page.md:14: TypeError: .*'x'"),
        ("x: int", "x: int =", r"page.md:8: SyntaxError"),
        ("  ```python\n", "  ```python no-run\n", r"page.md:16: no python block ran"),
        ("no-run", "norun", r"page.md:20: unknown kind of block: 'python norun'"),
        ("````\n", "```\n", r"page.md:23: .* never closed"),
    ],
    ids=["wrong output", "no output", "error", "syntax error", "output of no-run", "misspelt", "unclosed"],
)
def test_a_wrong_page_fails(tmp_path: Path, right: str, wrong: str, complaint: str) -> None:
    page = page_of(tmp_path, wrong.join(RIGHT.rsplit(right, 1)))
    with pytest.raises((AssertionError, pytest.fail.Exception), match=complaint):
        run_page(page)


def test_a_page_that_fails_ends_its_worlds(tmp_path: Path) -> None:
    text = "```python\nfrom shardwise import simulate\nouter = simulate(2).start()\nsimulate(3).start()\n1 / 0\n```\n"
    before = list(active)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run_page(page_of(tmp_path, text))
    assert active == before
