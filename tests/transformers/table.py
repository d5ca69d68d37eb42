"""Print which models of transformers compute what one device does: for each way to distribute them and each task.

python -m tests.transformers.table                      # the eight models of the tests, in all ways
python -m tests.transformers.table all                  # and 17 more architectures
python -m tests.transformers.table gemma "by parameter"    # entries with all these words
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter

from tests.transformers import tiny
from tests.transformers.models import FURTHER, MODELS

STYLED = tuple(MODELS)
"""The models whose modules have the names that `tiny.styled` knows."""


def verdict(name: str, way: str, task: str) -> tuple[str, str]:
    """Return "right", "wrong" or "error", and what the error says."""
    try:
        tiny.check(name, way, task)
    except AssertionError as error:
        return "wrong", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    return "right", ""


def main(words: list[str]) -> None:
    """Print a line for each model, way and task, and the counts."""
    counts: Counter[str] = Counter()
    asked = {word for word in words if word != "all"}
    for name in (*MODELS, *FURTHER) if "all" in words or asked & set(FURTHER) else MODELS:
        for way in tiny.WAYS:
            for task in tiny.tasks_of(name):
                if not asked <= {name, way, task} or (way == "styles" and name not in STYLED):
                    continue
                begin = time.perf_counter()
                result, text = verdict(name, way, task)
                counts[result] += 1
                took = time.perf_counter() - begin
                print(f"{name:9} {way:13} {task:14} {result:6} {took:5.1f} s  {text[:300]}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
