"""Run the cells of examples/train.ipynb, and put what they print into it:

python -m tests.programs.notebook
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "train.ipynb"


def run_cells(notebook: dict[str, Any], folder: Path = NOTEBOOK.parent) -> list[list[str]]:
    """What each code cell prints, by lines. The cells run in one namespace, in the folder of the notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    sys.path.insert(0, str(folder))
    try:
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
                printed.append(out.getvalue().splitlines(keepends=True))
    finally:
        sys.path.remove(str(folder))
    return printed


def stored_outputs(notebook: dict[str, Any]) -> list[list[str]]:
    """What the notebook says that each code cell printed."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[line for output in cell["outputs"] for line in output["text"]] for cell in code]


def renewed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with what its cells print now."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, (cell, lines) in enumerate(zip(code, run_cells(notebook), strict=True), 1):
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return notebook


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(renewed(json.loads(NOTEBOOK.read_text())), indent=1, ensure_ascii=False) + "\n")
