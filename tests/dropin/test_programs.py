"""Programs for torch.distributed.tensor run unmodified on four processes, with shardwise in its place."""

import pytest

from tests.dropin.compatibility import EQUAL, FILES, results


@pytest.mark.parametrize("file", [file for file in FILES if file != "heavyball_optimizers.py"])
def test_programs_are_equal_to_one_device(file: str) -> None:
    for library in FILES[file]:
        pytest.importorskip(library)
    found = dict(results(file, "shardwise"))
    assert found
    assert set(found.values()) == {EQUAL}, found
