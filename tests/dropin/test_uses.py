"""The private functions of `torch.distributed.tensor` that programs call, under their import paths here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shardwise._api import _shard_tensor
from shardwise._collective_utils import (
    mesh_broadcast,
    mesh_scatter,
    pad_tensor,
    redistribute_cost,
    shard_dim_alltoall,
    unpad_tensor,
)
from shardwise._random import OffsetBasedRNGTracker, is_rng_supported_mesh, manual_seed
from shardwise._utils import (
    ExplicitRedistributionContext,
    compute_global_tensor_shape,
    compute_local_shape_and_global_offset,
    compute_local_tensor_info,
    normalize_to_torch_size,
    try_find_mesh_from_args,
)
from shardwise.experimental._func_map import _local_map_wrapped
from shardwise.parallel._data_parallel_utils import _flatten_tensor, _unflatten_tensor
from shardwise.parallel.ddp import _localize_dtensor, _pre_dp_module_transform, _reconstruct_dtensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import CommunicationError, MeshError
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardwise.placement_types import DTensorSpec, TensorMeta, _MaskPartial
from tests.processes.pool import on_processes
from tests.worlds import mesh_of


def test_specs_by_the_names_of_placement_types():
    value = torch.arange(24.0).view(8, 3)
    with mesh_of(2, 2) as mesh:
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Replicate()), tensor_meta=meta)
        x = distribute_tensor(value, mesh, [Shard(0), Replicate()])
        assert spec is x._spec
        assert torch.equal(DTensor(x.to_local(), spec).full_tensor(), value)
    assert issubclass(_MaskPartial, Partial)


def test_shapes_of_a_tensor_on_this_rank():
    with mesh_of(4) as mesh:
        assert compute_local_tensor_info(torch.empty(8, 3), mesh, [Shard(0)]) == ([2, 3], [3, 1])
        assert compute_local_shape_and_global_offset((8, 3), mesh, [Shard(1)]) == ((8, 1), (0, 0))
        x = shardwise.zeros(3, device_mesh=mesh)
        assert try_find_mesh_from_args(torch.ops.aten.cat.default, ([torch.ones(3), x], 0)) is x.device_mesh
        with pytest.raises(MeshError, match=r"aten.sin.default got no distributed tensor"):
            try_find_mesh_from_args(torch.ops.aten.sin.default, (torch.ones(3),))
    assert normalize_to_torch_size(3) == torch.Size([3])
    assert normalize_to_torch_size([2, 3]) == normalize_to_torch_size(((2, 3),)) == torch.Size([2, 3])


def test_one_axis_of_a_local_tensor():
    value = torch.arange(32.0).view(4, 8)
    with mesh_of(2, 2) as mesh:
        x = distribute_tensor(value, mesh, [Replicate(), Shard(0)])
        local = shard_dim_alltoall(x.to_local(), 0, 1, mesh, 1)
        assert torch.equal(DTensor.from_local(local, mesh, [Replicate(), Shard(1)]).full_tensor(), value)
        assert redistribute_cost(x._spec, x._spec) == 0
        assert redistribute_cost(x._spec, x._spec.replicated()) > 0
        other = distribute_tensor(value, mesh["a"], [Shard(0)])
        assert redistribute_cost(x._spec, other._spec) == float("inf")
    padded = pad_tensor(value, 1, 3)
    assert padded.shape == (4, 11)
    assert torch.equal(unpad_tensor(padded, 1, 3), value)
    assert pad_tensor(value, 0, 0) is unpad_tensor(value, 0, 0) is value


def test_functions_of_local_tensors_and_refused_communication():
    value = torch.arange(8.0)
    with mesh_of(4) as mesh:
        x = _shard_tensor(value, [Shard(0)], mesh)
        assert torch.equal(x.full_tensor(), value)
        doubled = _local_map_wrapped(lambda t: t * 2, [Shard(0)], ([Shard(0)],), None, mesh, False, x)
        assert torch.equal(doubled.full_tensor(), value * 2)
        with ExplicitRedistributionContext(), pytest.raises(CommunicationError):
            x + distribute_tensor(value, mesh, [Partial()])
        summands = distribute_tensor(value, mesh, [Partial()])
        with ExplicitRedistributionContext(mode="warn"):
            for _ in range(2):  # also when the plan is known
                with pytest.warns(UserWarning, match="redistribute first"):
                    both = x + summands
            with pytest.warns(UserWarning, match="redistribute first"):
                torch.linalg.eigvals(distribute_tensor(torch.eye(4), mesh, [Shard(0)]))
            with ExplicitRedistributionContext(enable=False, mode="warn"):
                torch.add(x, summands)
            with ExplicitRedistributionContext(), pytest.raises(CommunicationError):
                torch.add(x, summands)
            x + x
        assert torch.equal(both.full_tensor(), value * 2)


def test_random_numbers_need_no_tracker():
    with mesh_of(4) as mesh:
        assert is_rng_supported_mesh(mesh)
        drawn = []
        for _ in range(2):
            manual_seed(3, mesh)
            with OffsetBasedRNGTracker(mesh)._distribute_region(shardwise.zeros(8, device_mesh=mesh)._spec):
                drawn.append(shardwise.rand(8, device_mesh=mesh, placements=[Shard(0)]).full_tensor())
        assert torch.equal(*drawn)


def test_local_shards_and_back():
    with mesh_of(4) as mesh:
        x = distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)])
        local, spec = _flatten_tensor(x)
        assert _unflatten_tensor(local, spec)._spec is x._spec
        plain = torch.ones(2)
        assert _flatten_tensor(plain) == (plain, None)
        model = shardwise.shard_parameters(nn.Linear(3, 8), mesh, [Shard(0)])
        specs = [parameter._spec for parameter in model.parameters()]
        _localize_dtensor(model)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        _reconstruct_dtensor(model, None)
        assert [parameter._spec for parameter in model._parameters.values()] == specs


@on_processes
def test_plain_tensors_along_an_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = mesh.get_coordinate()
    value = torch.full((2,), float(dist.get_rank()))
    mesh_broadcast(value, mesh, 1)
    assert value.tolist() == [2.0 * row] * 2
    out = torch.empty(2)
    mesh_scatter(out, [torch.full((2,), float(10 * row + i)) for i in range(2)], mesh, 1)
    assert out.tolist() == [10.0 * row + column] * 2
    shard = Shard(0)._shard_tensor(torch.arange(5.0) + 10 * dist.get_rank(), mesh, 1, src_data_rank=0)
    assert shard.tolist() == (torch.arange(5.0) + 20 * row).chunk(2)[column].tolist()
    assert compute_global_tensor_shape(shard.shape, mesh, [Replicate(), Shard(0)]) == torch.Size([5])


@on_processes
def test_data_parallel_around_tensor_parallel() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    alone = made()
    alone(x).square().mean().backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(made(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _pre_dp_module_transform(model)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    wrapped(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
    sharded = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
    for name, parameter in alone.named_parameters():
        found = dict(model.named_parameters())[name].grad
        expected = parameter.grad
        if name in sharded:
            expected = expected.chunk(2, sharded[name])[mesh["tp"].get_local_rank()]
        torch.testing.assert_close(found, expected)
