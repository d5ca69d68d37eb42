"""`out=` tensors that do not fit the result take its shape, as on one device; empty plain ones its global value."""

import math

import pytest
import torch

from shardwise import Partial, Replicate, Shard, zeros
from shardwise.testing import assemble, make_dtensor
from tests.worlds import mesh_of

VALUE = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial(), Replicate()])
def test_an_empty_tensor_takes_the_shape_of_the_result(placement):
    with mesh_of(2) as mesh:
        x = make_dtensor(VALUE, mesh, [placement], seed=0)
        out = x.new_empty(0)
        assert torch.add(x, x, out=out) is out
        assert torch.equal(assemble(out), VALUE + VALUE)
        assert torch.equal(assemble(torch.sum(x, 0, out=x.new_empty(0))), VALUE.sum(0))
        values, indices = torch.sort(x, 0, descending=True, out=(x.new_empty(0), x.new_empty(0, dtype=torch.int64)))
        assert torch.equal(assemble(values), VALUE.sort(0, descending=True).values)
        assert torch.equal(assemble(indices), VALUE.sort(0, descending=True).indices)


def test_a_tensor_of_another_shape_is_resized_with_a_warning():
    with mesh_of(2) as mesh:
        x = make_dtensor(VALUE, mesh, [Shard(0)], seed=0)
        out = make_dtensor(VALUE[:1], mesh, [Replicate()], seed=0)
        with pytest.warns(UserWarning, match=r"changes the shape of its out= tensor from \[1, 3\] to \[8, 3\]"):
            torch.cat([x, x], out=out)
        assert torch.equal(assemble(out), torch.cat([VALUE, VALUE]))


def test_a_result_is_cast_to_the_dtype_of_out():
    with mesh_of(2) as mesh:
        x = make_dtensor(VALUE / 2, mesh, [Shard(0)], seed=0)
        wide = zeros(4, 3, device_mesh=mesh, placements=[Shard(1)], dtype=torch.float64)
        torch.sin(x, out=wide)
        torch.testing.assert_close(assemble(wide), (VALUE / 2).sin().double())
        total = zeros(3, device_mesh=mesh, placements=[Replicate()], dtype=torch.int64)
        torch.sum(x, 0, out=total)
        assert torch.equal(assemble(total), torch.sum(VALUE / 2, 0, out=torch.zeros(3, dtype=torch.int64)))
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.sin(x, out=zeros(4, 3, device_mesh=mesh, placements=[Shard(0)], dtype=torch.int64))


def test_an_empty_plain_tensor_takes_the_global_value():
    with mesh_of(2) as mesh:
        x = make_dtensor(VALUE, mesh, [Partial()], seed=0)
        out = torch.empty(0)
        torch.mul(x, 2, out=out)
        assert torch.equal(out, VALUE * 2)
        with pytest.raises(RuntimeError, match="plain tensor"):
            torch.mul(x, 2, out=torch.empty(4, 3))


def test_a_write_that_would_broadcast_its_target_raises():
    with mesh_of(2) as mesh:
        x = make_dtensor(VALUE[:1, :1].clone(), mesh, [Replicate()], seed=0)
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            x[0].fmod_(x)


@pytest.mark.filterwarnings("ignore:.*out= tensor", "ignore:An output with one or more elements")
@pytest.mark.parametrize("shape", [(1, 12), (3, 2, 2), (2,), (9, 3), ()], ids=str)
@pytest.mark.parametrize("part", [slice(None), slice(1, None), slice(2, 3)], ids=str)
def test_a_view_that_changes_its_shape_writes_the_memory_that_it_views(shape: tuple[int, ...], part: slice):
    def into(base: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        out = base[part]
        torch.add(value, value, out=out)
        return [base, out]

    value = torch.arange(float(math.prod(shape))).view(shape) + 50
    for placement in (Shard(0), Replicate()):
        with mesh_of(2) as mesh:
            found = into(
                make_dtensor(VALUE, mesh, [placement], seed=0), make_dtensor(value, mesh, [Replicate()], seed=0)
            )
            for one, other in zip(into(VALUE.clone(), value), found, strict=True):
                assert torch.equal(one, assemble(other))
                assert one.stride() == other.stride()
