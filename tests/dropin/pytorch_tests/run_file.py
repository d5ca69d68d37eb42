"""Run one of PyTorch's test files with shardwise in the place of `torch.distributed.tensor`.

    python run_file.py FILE RESULTS.tsv [--theirs] [NAME ...]

The file itself is not changed. Ranks are forked, because a spawned rank would start without take-over; so are ranks
that would be threads of one process. Classes that repeat the same tests in PyTorch's LocalTensorMode are left out. Each
line of the results is outcome, file, test, seconds and the first words of the error; `--theirs` runs PyTorch's own
DTensor, and names select tests. The outcome "works" is a success where PyTorch expects its own DTensor to fail.
"""

import importlib.util
import os
import re
import sys
import time
import unittest
import warnings
from pathlib import Path

path, results, *rest = sys.argv[1:]
if "--theirs" not in rest:
    import shardwise

    shardwise.install()

import rank_processes  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch.testing._internal import common_distributed, common_utils  # noqa: E402

FOLDER = "distributed/tensor/"
LOCAL_TENSOR_MODE = re.compile("LocalTensor|LocalDTensor")


def _fork(case: common_distributed.MultiProcessTestCase) -> None:
    case._start_processes(torch.multiprocessing.get_context("fork").Process)


class _Result(unittest.TextTestResult):
    """Writes a line for each test."""

    def startTest(self, test: unittest.TestCase) -> None:
        self.started = time.time()
        super().startTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write("ok", test)
        super().addSuccess(test)

    def addExpectedFailure(self, test: unittest.TestCase, err: tuple) -> None:
        self._write("ok", test, "expected failure")
        super().addExpectedFailure(test, err)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._write("works", test)
        super().addUnexpectedSuccess(test)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write("skip", test, reason)
        super().addSkip(test, reason)

    def addFailure(self, test: unittest.TestCase, err: tuple) -> None:
        self._write("fail", test, _first_words(err[1]))
        _new_processes(type(test))
        super().addFailure(test, err)

    addError = addFailure

    def _write(self, outcome: str, test: unittest.TestCase, words: str = "") -> None:
        seconds = f"{time.time() - self.started:.1f}"
        line = [outcome, path.rpartition(FOLDER)[2], test.id().split(".", 1)[-1], seconds, words.replace("\n", " ")]
        with Path(results).open("a") as file:
            file.write("\t".join(line) + "\n")


def _first_words(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return " | ".join(dict.fromkeys((errors or lines)[:2]))[:400]


def _new_processes(case: type) -> None:
    """Start new ranks for the next test of a class that keeps its ranks; after a failure it would skip the others."""
    if not (issubclass(case, common_distributed.MultiProcContinuousTest) and case._processes_spawned):
        return
    for process in getattr(case, "processes", ()):
        process.kill()
    case._processes_spawned = case.poison_pill = False


def _run_tests(*_: object, **__: object) -> None:
    names = [name for name in rest if not name.startswith("-")]
    found = [test for suite in unittest.defaultTestLoader.loadTestsFromModule(module) for test in suite]
    chosen = [
        test
        for test in found
        if not LOCAL_TENSOR_MODE.search(type(test).__name__) and (not names or any(name in test.id() for name in names))
    ]
    unittest.TextTestRunner(resultclass=_Result, verbosity=0).run(unittest.TestSuite(chosen))
    os._exit(0)


warnings.simplefilter("ignore")
torch.multiprocessing.set_start_method("fork", force=True)
common_distributed.MultiProcessTestCase._spawn_processes = _fork
rank_processes.replace_threads()
common_utils.run_tests = _run_tests
sys.argv = [path]
sys.path.insert(0, str(Path(path).resolve().parent))
spec = importlib.util.spec_from_file_location("__main__", path)
module = importlib.util.module_from_spec(spec)
sys.modules["__main__"] = module
spec.loader.exec_module(module)
