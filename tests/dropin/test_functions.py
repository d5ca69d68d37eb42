"""The private functions that programs import: shapes, placements, strategies, context parallel."""

import pytest
import torch
import torch.nn.functional as F
from shardwise._op_schema import OpSchema, OpSpec, OpStrategy
from shardwise._ops.utils import is_tensor_evenly_shardable, normalize_dims, register_op_strategy
from shardwise._redistribute import redistribute_local_tensor
from shardwise._utils import (
    _compute_local_shape_and_global_offset,
    compute_global_tensor_info,
    compute_global_tensor_shape,
    compute_local_stride,
)
from shardwise.experimental._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    context_parallel_unshard,
    set_rotate_method,
)
from torch import nn

import shardwise
from shardwise import (
    DTensor,
    DTensorSpec,
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    ShardOrderEntry,
    distribute_tensor,
)
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError, ShapeError
from shardwise.experimental import context_parallel
from shardwise.placement_types import _StridedShard
from shardwise.world import replicate
from tests.parallel.models import first
from tests.worlds import mesh_of

SHAPES = [(8, 6), (7, 5), (3, 1)]
PLACEMENTS = [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(-1)), (Partial(), Shard(0))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_local_shape_and_offset_are_those_of_a_tensor(shape, placements):
    with mesh_of(2, 2) as mesh:
        spec = shardwise.empty(*shape, device_mesh=mesh, placements=placements)._spec
        for coordinate in ((0, 0), (0, 1), (1, 0), (1, 1)):
            found = _compute_local_shape_and_global_offset(shape, (2, 2), list(coordinate), placements)
            assert found == (spec.local_shape(coordinate), spec.global_offset(coordinate))
            by_axis = _compute_local_shape_and_global_offset(shape, (2, 2), coordinate.__getitem__, placements)
            assert by_axis == found
        assert _compute_local_shape_and_global_offset(shape, (2, 2), None, placements) == ((0,), ())


def test_global_info_of_local_tensors():
    with mesh_of(2, 2) as mesh:
        assert compute_global_tensor_info(torch.empty(4, 3), mesh, [Shard(0), Shard(1)]) == ([8, 6], [6, 1])
        assert compute_global_tensor_info(torch.empty(3, 4).t(), mesh, [Shard(0), Replicate()]) == ([8, 3], [1, 8])
    assert compute_local_stride((1, 8), (4, 3)) == (1, 4)
    assert compute_local_stride((3, 1), (2, 3)) == (3, 1)


def test_global_shape_of_shards_of_any_sizes():
    with mesh_of(2, 2) as mesh:
        assert compute_global_tensor_shape((4, 3), mesh, [Shard(0), Shard(1)]) == (8, 6)
        assert compute_global_tensor_shape((4, 3), mesh, [Replicate(), Partial()]) == (4, 3)


def test_placements_in_short():
    order = (ShardOrderEntry(0, (1, 0)),)
    assert DTensorSpec.format_shard_order_str((Shard(0), Shard(0)), order) == "S(0)[1]S(0)[0]"
    assert DTensorSpec.format_shard_order_str((Replicate(), InterleavedShard(1, 3), Partial("max")), None) == (
        "R_S(1, 3)P(max)"
    )
    assert not DTensorSpec.is_default_device_order(order)
    assert DTensorSpec.is_default_device_order(())


def test_sizes_of_shards_as_pytorch_says_them():
    from torch.distributed.tensor import Shard as TorchShard

    for size in range(12):
        for rank in range(4):
            assert Shard.local_shard_size_and_offset(size, 4, rank) == TorchShard.local_shard_size_and_offset(
                size, 4, rank
            )


@pytest.mark.parametrize("with_padding", [True, False])
def test_split_tensor_as_pytorch_does(with_padding):
    from torch.distributed.tensor import Shard as TorchShard

    tensor = torch.arange(15).view(5, 3)
    for dim in (0, 1):
        ours = Shard(dim)._split_tensor(tensor, 4, with_padding=with_padding, contiguous=True)
        theirs = TorchShard(dim)._split_tensor(tensor, 4, with_padding=with_padding, contiguous=True)
        assert ours[1] == theirs[1]
        assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


@pytest.mark.parametrize("with_padding", [True, False])
def test_split_tensor_of_interleaved_shards_as_pytorch_does(with_padding):
    from torch.distributed.tensor.placement_types import _StridedShard as TorchStridedShard

    for rows, blocks in ((8, 2), (12, 3)) if with_padding else ((8, 2), (12, 3), (10, 2), (7, 2)):
        tensor = torch.arange(rows * 2.0).view(rows, 2)
        ours = _StridedShard(0, split_factor=blocks)._split_tensor(tensor, 4, with_padding=with_padding)
        theirs = TorchStridedShard(0, split_factor=blocks)._split_tensor(tensor, 4, with_padding=with_padding)
        assert [shard.tolist() for shard in ours[0]] == [shard.tolist() for shard in theirs[0]]
        assert ours[1] == theirs[1]


def test_a_strided_shard_is_an_interleaved_one():
    assert _StridedShard(0, split_factor=2) is InterleavedShard(0, 2)
    assert InterleavedShard(0, 3).split_factor == 3
    assert Partial.LINEAR_REDUCE_OPS == ("sum", "avg")


def test_redistribute_local_tensor():
    with mesh_of(4) as mesh:
        value = torch.arange(10.0)
        x = distribute_tensor(value, mesh, [Shard(0)])
        target = x._spec.with_placements([Replicate()])
        for async_op in (False, True):
            local = redistribute_local_tensor(x.to_local(), x._spec, target, async_op=async_op)
            assert torch.equal(DTensor(local, target).full_tensor(), value)


def test_dims_and_evenness():
    assert normalize_dims(-1, 3) == (2,)
    assert list(normalize_dims([-1, 0], 3)) == [2, 0]
    with mesh_of(4) as mesh:
        spec = shardwise.empty(8, 3, device_mesh=mesh, placements=[Shard(0)])._spec
        assert is_tensor_evenly_shardable((8, 3), spec)
        assert not is_tensor_evenly_shardable((7, 3), spec)


def test_a_registered_strategy_is_the_rule_of_an_op():
    calls = []
    library = torch.library.Library("shardwise_strategies", "DEF")
    library.define("scale(Tensor x, float by) -> Tensor")
    library.impl("scale", lambda x, by: x * by, "CompositeExplicitAutograd")
    op = torch.ops.shardwise_strategies.scale.default

    @register_op_strategy(op)
    def scale(op_schema: OpSchema) -> OpStrategy:
        calls.append(op_schema)
        given = op_schema.args_schema[0]
        return OpStrategy([OpSpec(s.output_spec, [s.output_spec]) for s in given.strategies])

    value = torch.randn(7, 3)
    with mesh_of(2, 2) as mesh, shardwise.strict_ops(), shardwise.explicit():
        for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Partial(), Replicate()]):
            x = distribute_tensor(value, mesh, [Replicate(), Replicate()])
            with shardwise.explicit(False):
                x = x.redistribute(placements=placements)
            y = op(x, 3.0)
            assert y.placements == tuple(placements)
            with shardwise.explicit(False):
                torch.testing.assert_close(y.full_tensor(), value * 3)
    assert calls


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_context_parallel_is_attention_over_the_whole_sequence(is_causal, rotate, monkeypatch):
    monkeypatch.setattr(_cp_options, "rotate_method", None)  # restored at the end
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = F.scaled_dot_product_attention(*plain, is_causal=is_causal)
    expected.square().sum().backward()
    set_rotate_method(rotate)
    with mesh_of(4) as mesh:
        placed = [distribute_tensor(tensor, mesh, [Shard(2)]).to_local().requires_grad_() for tensor in tensors]
        with context_parallel(mesh):
            found = F.scaled_dot_product_attention(*placed, is_causal=is_causal)
        found.square().sum().backward()
        torch.testing.assert_close(context_parallel_unshard(mesh, [found.detach()], [2])[0], expected.detach())
        for leaf, reference in zip(placed, plain, strict=True):
            (gradient,) = context_parallel_unshard(mesh, [leaf.grad], [2])
            torch.testing.assert_close(gradient, reference.grad)


def test_the_order_of_a_block_ends_with_it_unless_buffers_stay_sharded(monkeypatch):
    """Later blocks without buffers get the shards in the order of the sequence, or of the buffers that stayed."""
    monkeypatch.setattr(_cp_options, "enable_load_balance", True)
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
    with mesh_of(2) as mesh:
        in_order = [distribute_tensor(tensor, mesh, [Shard(2)]).to_local() for tensor in tensors]

        def attend(shards):
            with context_parallel(mesh):
                found = F.scaled_dot_product_attention(*shards, is_causal=True)
            return DTensor.from_local(found, mesh, [Shard(2)]).full_tensor()

        buffers = [replicate(tensor) for tensor in tensors]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            assert buffers[0].shape == (1, 2, 4, 4)
        torch.testing.assert_close(first(attend(in_order)), expected)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(buffers)):
            pass
        found = attend(buffers)
        assert not torch.allclose(first(found), expected)
        balancer = _HeadTailLoadBalancer(8, 2, "cpu")
        torch.testing.assert_close(first(found), expected[:, :, balancer._generate_indices(restore=False)[0]])


def test_plain_buffers_of_context_parallel_are_refused_when_simulated():
    with (
        mesh_of(4) as mesh,
        pytest.raises(InputError, match="one plain tensor cannot become a shard per rank"),
        context_parallel(mesh, buffers=[torch.ones(2, 8)], buffer_seq_dims=[1]),
    ):
        pass


def test_input_reshard_does_not_change_gradients():
    from shardwise.parallel.input_reshard import input_reshard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    value = torch.randn(6, 8)
    model(value).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with mesh_of(4) as mesh:
        shardwise.distribute_module(model, mesh)
        input_reshard(model, mesh, 0)
        model(distribute_tensor(value, mesh, [Replicate()])).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


# ---- load balancers of context parallel ------------------------------------------------------------------------------


def balancers(length, ranks):
    return {
        "head and tail": _HeadTailLoadBalancer(length, ranks, "cpu"),
        "documents": _PerDocumentHeadTailLoadBalancer([[length // 2] * 2, [length]], ranks, "cpu"),
        "none": None,
    }


def test_orders_are_those_of_pytorch():
    theirs = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    for length, ranks in ((16, 4), (16, 2), (8, 1)):
        one = theirs._HeadTailLoadBalancer(length, ranks, "cpu"), _HeadTailLoadBalancer(length, ranks, "cpu")
        lengths = [[length, 2 * length], [3 * length]]
        two = (
            theirs._PerDocumentHeadTailLoadBalancer(lengths, ranks, "cpu"),
            _PerDocumentHeadTailLoadBalancer(lengths, ranks, "cpu"),
        )
        for expected, found in (one, two):
            for restore in (False, True):
                assert expected._generate_indices(restore).tolist() == found._generate_indices(restore).tolist()
    with pytest.raises(ShapeError, match="pad it to a multiple of 8"):
        _HeadTailLoadBalancer(12, 4, "cpu")._generate_indices()


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_head_and_tail_stay_where_they_are(monkeypatch):
    """A ring knows the positions of a sequence in head-tail order: it is not put back in order."""
    monkeypatch.setattr(_cp_options, "rotate_method", None)
    set_rotate_method("alltoall")
    with mesh_of(4) as mesh:
        replicas = [DTensor.from_local(torch.randn(2, 4, 16, 8), mesh, [Replicate()]).to_local() for _ in range(3)]
        shards = _context_parallel_shard(mesh, replicas, [2, 2, 2], _HeadTailLoadBalancer(16, 4, "cpu"))
        with CommDebugMode() as counted, context_parallel(mesh):
            Attention()(*shards)
    assert counted.get_total_counts() == 3


@pytest.mark.parametrize("by_style", [True, False])
@pytest.mark.parametrize("name", balancers(16, 4))
def test_causal_attention_of_a_rearranged_sequence(name, by_style):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 16, 8) for _ in range(3)]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = Attention()(*plain)
    expected.square().sum().backward()
    with mesh_of(4) as mesh:
        balancer = balancers(16, 4)[name]
        replicas = [DTensor.from_local(tensor, mesh, [Replicate()]).to_local() for tensor in tensors]
        shards = _context_parallel_shard(mesh, {"q": replicas[0]}, {"q": 2}, balancer)
        shards += _context_parallel_shard(mesh, replicas[1:], [2, 2], balancer)
        leaves = [shard.requires_grad_() for shard in shards]
        if by_style:
            _enable_context_parallel_dispatcher()
            style = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)
            found = shardwise.parallel.parallelize_module(Attention(), mesh, style)(*leaves)
        else:
            with context_parallel(mesh):
                found = Attention()(*leaves)
        found.square().sum().backward()
        (whole,) = context_parallel_unshard(mesh, [found.detach()], [2], balancer)
        torch.testing.assert_close(first(whole), expected.detach())
        for leaf, reference in zip(leaves, plain, strict=True):
            torch.testing.assert_close(
                first(context_parallel_unshard(mesh, [leaf.grad], [2], balancer)[0]), reference.grad
            )


def test_a_sequence_of_another_length_than_its_order_is_refused():
    with mesh_of(2) as mesh:
        local = DTensor.from_local(torch.randn(1, 2, 16, 4), mesh, [Replicate()]).to_local()
        _context_parallel_shard(mesh, [local], [2], _HeadTailLoadBalancer(16, 2, "cpu"))
        with context_parallel(mesh), pytest.raises(ShapeError, match="load balancer is for length 16"):
            F.scaled_dot_product_attention(*[local[:, :, :4]] * 3)
