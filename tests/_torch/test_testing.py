"""The parts of PyTorch's own test suite that the verifier uses."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise._torch.testing import FileStore, operator_database, runs_on_cpu


def test_operator_database_has_entries_with_samples() -> None:
    pytest.importorskip("expecttest")  # PyTorch's own tests need it
    database = operator_database()
    assert len(database) > 500
    assert "norm:fro" in database
    entry = database["addmm"]
    assert (entry.name, entry.variant_test_name, entry.aten_name) == ("addmm", "", "addmm")
    assert entry.supports_dtype(torch.float64, "cpu")
    assert torch.float64 in entry.supported_dtypes("cpu")
    assert entry.supports_out
    assert entry.supports_autograd
    assert entry.inplace_variant is not None
    sample = next(iter(entry.sample_inputs("cpu", torch.float64, requires_grad=False)))
    assert not sample.broadcasts_input
    result = entry.op(sample.input, *sample.args, **sample.kwargs)
    assert torch.equal(sample.output_process_fn_grad(result), result)


def test_runs_on_cpu() -> None:
    assert runs_on_cpu(torch.ops.aten.mm.default)
    assert runs_on_cpu(torch.ops.aten.linear.default)
    assert not runs_on_cpu(torch.ops.aten._cudnn_init_dropout_state.default)


def test_file_store_is_the_public_one(tmp_path: Path) -> None:
    assert FileStore is dist.FileStore
    store = FileStore(str(tmp_path / "store"))
    store.set("key", "value")
    assert store.check(["key"])
    assert FileStore(str(tmp_path / "store")).get("key") == b"value"
