"""Every name that programs import from `torch.distributed.tensor` is found at the same place under shardwise."""

import importlib
import subprocess
import sys

import pytest

import shardwise
from shardwise.dropin.table import FILES, MODULES, NO_COUNTERPART, names_of
from shardwise.errors import InputError

LISTED = [(module, name) for module in MODULES for name in names_of(module)]
ALL = [(module, name) for module, name in LISTED if names_of(module)[name] != NO_COUNTERPART]
PUBLIC = {
    "": "DTensor distribute_tensor distribute_module Shard Replicate Partial Placement DeviceMesh init_device_mesh "
    "ones empty full rand randn zeros _DTensorSpec",
    "placement_types": "Placement Shard Replicate Partial _StridedShard _MaskPartial DTensorSpec TensorMeta",
    "experimental": "context_parallel implicit_replication local_map register_sharding",
    "parallel": "ColwiseParallel RowwiseParallel SequenceParallel PrepareModuleInput PrepareModuleOutput "
    "PrepareModuleInputOutput ParallelStyle parallelize_module loss_parallel",
    "debug": "CommDebugMode visualize_sharding _clear_sharding_prop_cache",
    "device_mesh": "DeviceMesh init_device_mesh",
}


@pytest.mark.parametrize(("module", "name"), ALL, ids=[".".join(entry) for entry in ALL])
def test_a_name_of_the_table_is_there(module, name):
    assert hasattr(importlib.import_module(f"shardwise.{module}"), name)


@pytest.mark.parametrize("module", PUBLIC)
def test_a_module_that_is_a_file_has_the_names(module):
    found = importlib.import_module(f"shardwise.{module}" if module else "shardwise")
    assert [name for name in PUBLIC[module].split() if not hasattr(found, name)] == []
    assert not module or module in FILES


@pytest.mark.parametrize(("module", "name"), ALL, ids=[".".join(entry) for entry in ALL])
def test_pytorch_has_the_name_at_the_same_place(module, name):
    theirs = pytest.importorskip(f"torch.distributed.tensor.{module}")
    if not hasattr(theirs, name):
        pytest.skip(f"not in this version of PyTorch: {name}")
    ours = getattr(importlib.import_module(f"shardwise.{module}"), name)
    assert isinstance(ours, type) == isinstance(getattr(theirs, name), type) or name == "ExplicitRedistributionContext"


def test_classes_mean_ours():
    from shardwise._api import DTensor
    from shardwise._dtensor_spec import DTensorSpec, ShardOrderEntry
    from shardwise.parallel.api import parallelize_module
    from shardwise.parallel.style import ColwiseParallel

    assert (DTensor, DTensorSpec) == (shardwise.DTensor, shardwise.DTensorSpec)
    assert ShardOrderEntry is shardwise.ShardOrderEntry
    assert parallelize_module is importlib.import_module("shardwise.parallel").parallelize_module
    assert ColwiseParallel.__module__.startswith("shardwise.parallel")


def test_a_module_of_the_table_is_an_attribute_without_an_import():
    command = [sys.executable, "-c", "import shardwise; shardwise._random.manual_seed; shardwise._nothing"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "AttributeError: module 'shardwise' has no attribute '_nothing'" in found.stderr


def test_import_star_takes_the_public_names():
    namespace: dict = {}
    exec("from shardwise._api import *", namespace)
    assert namespace["DTensor"] is shardwise.DTensor
    assert "_shard_tensor" not in namespace


def test_a_name_that_is_nowhere_is_refused_with_those_there_are():
    module = importlib.import_module("shardwise._ops.utils")
    with pytest.raises(AttributeError, match=r"shardwise._ops.utils has no 'einop_rule': .*register_op_strategy"):
        _ = module.einop_rule
    with pytest.raises(ModuleNotFoundError, match=r"shardwise\._nothing"):
        importlib.import_module("shardwise._nothing")


@pytest.mark.parametrize(("module", "name"), sorted({*LISTED} - {*ALL}))
def test_a_name_without_counterpart_can_be_imported_and_not_used(module, name):
    found = getattr(importlib.import_module(f"shardwise.{module}"), name)
    assert not isinstance(3, found)
    for use in (found, lambda: found["view"], lambda: [*found], lambda: found.dim, lambda: "view" in found):
        with pytest.raises(InputError, match=rf"shardwise\.{module}\.{name} is part of the implementation of PyTorch"):
            use()


def test_importing_shardwise_imports_no_module_of_the_table():
    listed = "[m for m in sys.modules if m.startswith('shardwise._') and '._torch' not in m]"
    command = [sys.executable, "-c", f"import sys, shardwise; print({listed})"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
