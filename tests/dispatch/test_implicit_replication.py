"""Plain tensors among distributed ones: refused, or taken as replicated where the user says so."""

import pytest
import torch

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.errors import MixedTensorError
from shardwise.testing import assemble
from tests.ops.helpers import on, r, ranks

X, Y = r(5, 4), r(5, 4, seed=1)


def test_refused_without_it() -> None:
    with ranks(2) as mesh, pytest.raises(MixedTensorError, match=r"shardwise\.(experimental\.)?implicit_replication"):
        on(mesh, X, Shard(0)) + Y


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)], ids=str)
def test_taken_as_replicated(placement: shardwise.Placement, sizes: tuple[int, ...]) -> None:
    with ranks(*sizes) as mesh, shardwise.implicit_replication():
        x = on(mesh, X, placement)
        for found, wanted in (
            (x + Y, X + Y),
            (Y * x, Y * X),
            (x @ r(4, 3), X @ r(4, 3)),
            (torch.cat([x, Y]), torch.cat([X, Y])),
            (torch.where(Y > 0, x, Y), torch.where(Y > 0, X, Y)),
            (x.index_select(0, torch.tensor([3, 1])), X[[3, 1]]),
            (torch._foreach_add([x, x], [Y, X])[1], X + X),
        ):
            torch.testing.assert_close(assemble(found), wanted)


def test_a_cut_tensor_stays_cut() -> None:
    """The plain tensor is sliced, which costs nothing; the other is not gathered."""
    with ranks(2) as mesh, shardwise.implicit_replication(), shardwise.explicit():
        assert (on(mesh, X, Shard(0)) + Y).placements == (Shard(0),)
        assert (on(mesh, X, Shard(1)) @ r(4, 3)).placements == (Partial("sum"),)


def test_in_place_on_a_distributed_tensor() -> None:
    with ranks(2) as mesh, shardwise.implicit_replication():
        x = on(mesh, X, Shard(0))
        x += Y
        x.mul_(Y)
        torch.testing.assert_close(assemble(x), (X + Y) * Y)


def test_gradients_of_the_distributed_ones() -> None:
    with ranks(2) as mesh, shardwise.implicit_replication():
        x = on(mesh, X, Shard(0), grad=True)
        (x * Y).sum().backward()
        torch.testing.assert_close(assemble(x.grad), Y)


def test_local_tensors_that_differ_between_ranks_are_refused() -> None:
    with ranks(2) as mesh, shardwise.implicit_replication():
        x = on(mesh, X, Replicate())
        with pytest.raises(MixedTensorError, match="differ between ranks"):
            x + shardwise.world.map_ranks(lambda rank: Y + rank)
        torch.testing.assert_close(assemble(x + shardwise.world.replicate(Y)), X + Y)


def test_it_ends_with_its_block() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        with shardwise.experimental.implicit_replication():
            x + Y
        with pytest.raises(MixedTensorError):
            x + Y


def test_lists_end_with_the_block_too() -> None:
    """A plan of a call that was accepted must not serve one that is not."""
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        with shardwise.implicit_replication():
            torch._foreach_add([x, x], [Y, Y])
        with pytest.raises(MixedTensorError, match=r"'other\[0\]'"):
            torch._foreach_add([x, x], [Y, Y])


def test_lists_may_hold_plain_tensors_that_meet_plain_ones() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        found = torch._foreach_add([x, X], [x, Y])
        torch.testing.assert_close(assemble(found[0]), X + X)
        torch.testing.assert_close(found[1], X + Y)
        with shardwise.implicit_replication():
            found = torch._foreach_add([x, X, X], [Y, Y, x])
        torch.testing.assert_close(assemble(found[0]), X + Y)
        torch.testing.assert_close(found[1], X + Y)
        torch.testing.assert_close(assemble(found[2]), X + X)


def test_gradients_of_lists_outside_of_the_block() -> None:
    one = X.abs().requires_grad_()
    (one * Y + one**Y).sum().backward()
    assert one.grad is not None
    with ranks(2) as mesh:
        x = on(mesh, X.abs(), Shard(0), grad=True)
        with shardwise.implicit_replication():
            made = [*torch._foreach_mul([x], [Y]), *torch._foreach_pow([x], [Y])]
        sum(result.sum() for result in made).backward()
        torch.testing.assert_close(assemble(x.grad), one.grad)


def test_a_plain_scale_of_a_list_is_a_number_for_all() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0))
        found = torch._foreach_addcmul([x], [x], [x], torch.tensor([2.0]))
        torch.testing.assert_close(assemble(found[0]), X + 2 * X * X)
