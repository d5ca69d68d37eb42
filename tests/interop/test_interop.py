"""To PyTorch's DTensor and back: same memory, same shards, and gradients flow."""

import pytest
import torch
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise
from shardwise import InterleavedShard, P, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from shardwise.errors import MixedTensorError
from shardwise.interop import from_torch, to_torch
from tests.processes.pool import on_processes

SHARD_0 = torch_tensor.Shard(0)
DISTRIBUTE = torch_tensor.distribute_tensor
THEIRS = {
    "Shard(0), Shard(1)": [SHARD_0, torch_tensor.Shard(1)],
    "Shard(0) twice": [SHARD_0, SHARD_0],
    "Replicate, Shard(1)": [torch_tensor.Replicate(), torch_tensor.Shard(1)],
    "strided": [_StridedShard(0, split_factor=2), SHARD_0],
}


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.storage_offset() == b.storage_offset()


@pytest.mark.parametrize("name", THEIRS)
@on_processes
def test_from_torch(name) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(8.0 * 6).reshape(8, 6)
    theirs = torch_tensor.distribute_tensor(whole, mesh, THEIRS[name])
    ours = from_torch(theirs)
    assert type(ours) is shardwise.DTensor
    assert not ours.requires_grad
    assert ours.device_mesh == mesh
    assert same_memory(ours.to_local(), theirs.to_local())
    assert torch.equal(ours.full_tensor(), whole)
    back = to_torch(ours)
    assert list(back.placements) == THEIRS[name]
    assert same_memory(back.to_local(), theirs.to_local())
    assert torch.equal(back.full_tensor(), whole)


OURS = {
    "uneven": P("dp", "tp"),
    "uneven, twice": P(("dp", "tp")),
    "tp before dp": P(None, ("tp", "dp")),
    "interleaved": [Replicate(), InterleavedShard(1, 3)],
    "partial": P("dp", partial={"tp": "sum"}),
    "partial max": P(partial={"dp": "max", "tp": "max"}),
    "replicated": P(),
}


@pytest.mark.parametrize("name", OURS)
@on_processes
def test_to_torch(name) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(7.0 * 12).reshape(7, 12)
    ours = distribute_tensor(whole, mesh, OURS[name])
    theirs = to_torch(ours)
    assert same_memory(theirs.to_local(), ours.to_local())
    if name != "interleaved" or torch.__version__ >= (2, 13):  # PyTorch 2.11 cannot gather it
        assert torch.equal(theirs.full_tensor(), whole)
    back = from_torch(theirs)
    assert back.spec.layout is ours.spec.layout
    assert torch.equal(back.full_tensor(), whole)


@on_processes
def test_every_reduction() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for op in ("sum", "avg", "max", "min", "product"):
        ours = distribute_tensor(torch.arange(1.0, 7.0), mesh, [Partial(op)])
        theirs = to_torch(ours)
        assert list(theirs.placements) == [torch_tensor.Partial(op)]
        assert torch.equal(theirs.full_tensor(), torch.arange(1.0, 7.0))
        assert from_torch(theirs).placements == (Partial(op),)


@on_processes
def test_layouts_that_only_one_side_has() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    uneven = distribute_tensor(torch.arange(7.0), mesh, P(("tp", "dp")))
    with pytest.raises(shardwise.errors.InputError, match="cannot express this layout: redistribute"):
        to_torch(uneven)
    strided = [_StridedShard(0, split_factor=2), SHARD_0]
    for size in (6, 7):
        theirs = torch_tensor.DTensor.from_local(torch.ones(2), mesh, strided, shape=torch.Size([size]), stride=(1,))
        with pytest.raises(shardwise.errors.InputError, match="uneven sizes: redistribute"):
            from_torch(theirs)


@on_processes
def test_a_shard_that_does_not_fit() -> None:
    mesh = init_device_mesh("cpu", (4,))
    wrong = torch_tensor.DTensor.from_local(torch.ones(2), mesh, [SHARD_0], shape=torch.Size([7]), stride=(1,))
    rank = torch.distributed.get_rank()
    if rank == 3:
        with pytest.raises(shardwise.errors.InputError, match=r"has shape \[2\], not \[1\]"):
            from_torch(wrong)
    else:
        assert from_torch(wrong).shape == (7,)


@on_processes
def test_gradients_flow_through_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.randn(6, 4)
    expected = whole.clone().requires_grad_()
    (expected.sin() * expected).sum().backward()

    leaf = torch_tensor.distribute_tensor(whole, mesh, [SHARD_0, torch_tensor.Shard(1)]).requires_grad_()
    ours = from_torch(leaf)
    assert ours.requires_grad
    (ours.sin() * ours).sum().backward()
    assert leaf.grad.placements == leaf.placements
    torch.testing.assert_close(leaf.grad.full_tensor(), expected.grad)

    mine = distribute_tensor(whole, mesh, P("dp", "tp")).requires_grad_()
    theirs = to_torch(mine)
    assert theirs.requires_grad
    (theirs.sin() * theirs).sum().backward()
    assert mine.grad.placements == mine.placements
    torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("convert", [from_torch, to_torch])
@on_processes
def test_a_plain_gradient_is_refused(convert) -> None:
    mesh = init_device_mesh("cpu", (4,))
    distribute, shard = (distribute_tensor, Shard(0)) if convert is to_torch else (DISTRIBUTE, SHARD_0)
    leaf = distribute(torch.ones(4, 2), mesh, [shard]).requires_grad_()
    converted = convert(leaf)
    with pytest.raises(MixedTensorError):
        converted.backward(torch.ones(4, 2), retain_graph=True)
    with shardwise.implicit_replication():
        converted.backward(torch.arange(8.0).view(4, 2))
    assert torch.equal(leaf.grad.full_tensor(), torch.arange(8.0).view(4, 2))


@pytest.mark.parametrize("op", ["sum", "avg"])
@on_processes
def test_gradients_of_operands(op) -> None:
    """The gradient of sum(3 v) is 3, whatever v is a reduction of."""
    mesh = init_device_mesh("cpu", (4,))
    theirs = torch_tensor.DTensor.from_local(torch.ones(3), mesh, [torch_tensor.Partial(op)]).requires_grad_()
    (from_torch(theirs) * 3).sum().backward()
    assert torch.equal(theirs.grad.full_tensor(), torch.full((3,), 3.0))
    ours = distribute_tensor(torch.ones(3), mesh, [Partial(op)]).requires_grad_()
    (to_torch(ours) * 3).sum().backward()
    assert torch.equal(ours.grad.full_tensor(), torch.full((3,), 3.0))


@on_processes
def test_submesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    theirs = torch_tensor.distribute_tensor(torch.arange(6.0), mesh["tp"], [SHARD_0])
    ours = from_torch(theirs)
    assert ours.device_mesh == mesh["tp"]
    assert ours.placements == (Shard(0),)
    assert torch.equal((ours * 2).full_tensor(), torch.arange(6.0) * 2)
    assert to_torch(ours).device_mesh == mesh["tp"]


@on_processes
def test_weights_of_a_fully_sharded_tensor_parallel_module() -> None:
    """PyTorch cuts them over tp, then over dp, on a mesh whose first axis is dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = {name: from_torch(tensor) for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        assert torch.equal(tensor.full_tensor(), weights[name]), name
    assert "(tp, dp)" in repr(state["0.weight"].spec)


@on_processes
def test_data_that_has_not_arrived() -> None:
    mesh = init_device_mesh("cpu", (4,))
    theirs = torch_tensor.distribute_tensor(torch.arange(8.0), mesh, [SHARD_0])
    coming = theirs.redistribute(placements=[torch_tensor.Replicate()], async_op=True)
    assert type(from_torch(coming).to_local()) is torch.Tensor
    assert torch.equal(from_torch(coming).full_tensor(), torch.arange(8.0))
    ours = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
    assert torch.equal(to_torch(ours).full_tensor(), torch.arange(8.0))


@on_processes
def test_second_derivatives() -> None:
    mesh = init_device_mesh("cpu", (4,))
    leaf = torch_tensor.distribute_tensor(torch.arange(1.0, 9.0), mesh, [SHARD_0]).requires_grad_()
    (first,) = torch.autograd.grad((from_torch(leaf) ** 3).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(from_torch(first).sum(), leaf)
    assert torch.equal(second.full_tensor(), 6 * torch.arange(1.0, 9.0))


def test_refusals() -> None:
    with pytest.raises(shardwise.errors.InputError, match="from_torch got a Tensor"):
        from_torch(torch.ones(2))
    with pytest.raises(shardwise.errors.InputError, match="to_torch got a Tensor"):
        to_torch(torch.ones(2))
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(shardwise.errors.InputError, match="to_torch in a simulated world"):
            to_torch(distribute_tensor(torch.ones(2), mesh, [Shard(0)]))
        theirs = torch_tensor.DTensor.from_local(torch.ones(2), mesh, [SHARD_0])
        with pytest.raises(shardwise.errors.InputError, match="from_torch in a simulated world"):
            from_torch(theirs)
