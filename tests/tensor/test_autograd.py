"""Gradients where whole and local tensors meet, against the plain gradient on one device.

Losses are taken on `full_tensor()` or on local tensors, so that these tests are about the edges and nothing else. The
loss `(x * w).sum()` has the gradient `w`, whatever happens to `x` on the way.
"""

import copy
import itertools
import weakref

import pytest
import torch

import shardwise
from shardwise import DTensor, P, Partial, RankTensor, Replicate, Shard, distribute_tensor, zeros
from shardwise.errors import InputError, ShapeError
from shardwise.testing import assemble, make_dtensor
from shardwise.testing.values import same
from tests.worlds import Recorder, mesh_of

SHAPES = {"even": (6, 4), "uneven": (5, 3), "smaller-than-the-mesh": (1, 2), "empty": (0, 4)}
KINDS = [Shard(0), Shard(1), Replicate(), Partial()]
PAIRS = list(itertools.product(KINDS, repeat=2))

shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@pytest.fixture
def mesh():
    with mesh_of(2, 3) as mesh:
        yield mesh


def numbers(shape, dtype=torch.float64):
    return torch.randint(-20, 20, shape).to(dtype)


def leaf_of(value, mesh, placements):
    return make_dtensor(value, mesh, placements, seed=0).requires_grad_()


def cotangent(placements):
    """A gradient is cut as its tensor, and replicated where that is Partial."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def local_parts(value, mesh, placements):
    """What each rank holds of a value."""
    return make_dtensor(value, mesh, placements, seed=0).to_local()


def per_rank_weights(shape, ranks):
    """Different weights on every rank, and their sum."""
    parts = [numbers(shape) for _ in range(ranks)]
    return RankTensor(parts), sum(parts)


# ---- redistribute ----------------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("source", PAIRS, ids=str)
def test_redistribute(mesh, shape, source):
    for target in [*PAIRS, P(("b", "a")), P(None, ("b", "a"))]:
        x, w = leaf_of(numbers(shape), mesh, source), numbers(shape)
        y = x.redistribute(placements=target)
        assert y.requires_grad
        assert not y.is_leaf
        (y.full_tensor() * w).sum().backward()
        assert x.grad.placements == cotangent(source)
        assert torch.equal(assemble(x.grad), w)


@shapes
def test_redistribute_with_a_loss_on_local_parts(mesh, shape):
    # The whole loss is the sum of the ranks' losses where the tensor is cut, and each rank's own where it is not.
    for source, target in itertools.product(PAIRS, repeat=2):
        x, w = leaf_of(numbers(shape), mesh, source), numbers(shape)
        weights = local_parts(w, mesh, cotangent(target))
        (x.redistribute(placements=target).to_local() * weights).sum().backward()
        assert x.grad.placements == cotangent(source)
        assert torch.equal(assemble(x.grad), w)


def test_several_steps(mesh):
    x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Partial()]), numbers((5, 3))
    y = x
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(1)], [Partial(), Partial()], [Shard(0), Shard(0)]):
        y = y.redistribute(placements=placements)
    (y.full_tensor() * w).sum().backward()
    assert torch.equal(assemble(x.grad), w)


def test_used_twice(mesh):
    # Both branches' gradients meet at the leaf.
    x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Shard(1)]), [numbers((5, 3)) for _ in range(2)]
    one = (x.redistribute(placements=[Replicate(), Shard(1)]).full_tensor() * w[0]).sum()
    other = (x.redistribute(placements=[Partial(), Shard(0)]).full_tensor() * w[1]).sum()
    (one + other).backward()
    assert x.grad.placements == x.placements
    assert torch.equal(assemble(x.grad), w[0] + w[1])


def test_to_the_same_placements(mesh):
    x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Partial()]), numbers((5, 3))
    (x.redistribute(placements=x.placements).full_tensor() * w).sum().backward()
    assert torch.equal(assemble(x.grad), w)


def test_nothing_is_recorded_without_grad(mesh):
    x = leaf_of(numbers((5, 3)), mesh, [Shard(0), Shard(1)])
    with torch.no_grad():
        for result in (x.redistribute(placements=[Replicate()] * 2), x.full_tensor(), x.to_local()):
            assert not result.requires_grad
            assert result.grad_fn is None


@pytest.mark.parametrize("source", PAIRS, ids=str)
def test_double_backward(mesh, source):
    # (x ** 3).sum(): the gradient is 3 x^2; weighted by w and summed, its gradient is 6 x w.
    value, w = numbers((5, 3)), numbers((5, 3))
    for target in PAIRS:
        x = leaf_of(value, mesh, source)
        z = x.redistribute(placements=target).full_tensor()
        (first,) = torch.autograd.grad((z**3).sum(), x, create_graph=True)
        assert isinstance(first, DTensor)
        assert torch.equal(assemble(first.detach()), 3 * value**2)
        (first.full_tensor() * w).sum().backward()
        assert torch.equal(assemble(x.grad), 6 * value * w)


def test_double_backward_through_the_gradient_of_the_output(mesh):
    # The backward of redistribute is linear in the incoming gradient: its own gradient moves back again.
    value, w = numbers((5, 3)), numbers((5, 3))
    x = leaf_of(value, mesh, [Shard(0), Shard(1)])
    y = x.redistribute(placements=[Replicate(), Shard(0)])
    incoming = leaf_of(numbers((5, 3)), mesh, [Replicate(), Shard(0)])
    (first,) = torch.autograd.grad(y, x, incoming, create_graph=True)
    assert torch.equal(assemble(first.detach()), assemble(incoming.detach()))
    (first.full_tensor() * w).sum().backward()
    assert incoming.grad.placements == incoming.placements
    assert torch.equal(assemble(incoming.grad), w)


@pytest.mark.parametrize(("source", "target"), [([Partial()], [Shard(0)]), ([Shard(0)], [Shard(1)])], ids=str)
def test_async(source, target):
    with mesh_of(4) as mesh:
        x, w = leaf_of(numbers((8, 4)), mesh, source), numbers((8, 4))
        y = x.redistribute(placements=target, async_op=True)
        (y.to_local() * local_parts(w, mesh, target)).sum().backward()
        assert x.grad.placements == cotangent(source)
        assert torch.equal(assemble(x.grad), w)


# ---- dtypes of the communication ------------------------------------------------------------------------------------


class TestDtypes:
    # 257 needs 9 bits: bfloat16, which has 8, rounds it to 256.
    FINE, COARSE = 257.0, 256.0

    def moved(self, mesh, source, target, **dtypes):
        """The result and the dtypes communicated on the way there and back."""
        x = leaf_of(torch.full((4, 4), self.FINE), mesh, source)
        with Recorder() as forward:
            y = x.redistribute(placements=target, **dtypes)
        weights = local_parts(torch.full((4, 4), self.FINE), mesh, target)
        with Recorder() as backward:
            (y.to_local().float() * weights).sum().backward()
        assert x.grad.dtype == x.dtype == torch.float32
        return x, y, forward.dtypes, backward.dtypes

    def test_as_they_are(self):
        with mesh_of(2) as mesh:
            _, y, forward, backward = self.moved(mesh, [Shard(0)], [Shard(1)])
            assert (y.dtype, forward, backward) == (torch.float32, {torch.float32}, {torch.float32})

    def test_forward_dtype(self):
        with mesh_of(2) as mesh:
            x, y, forward, _ = self.moved(mesh, [Shard(0)], [Shard(1)], forward_dtype=torch.bfloat16)
            assert (y.dtype, forward) == (torch.bfloat16, {torch.bfloat16})
            assert assemble(y.detach()).unique().item() == self.COARSE
            assert assemble(x.detach()).unique().item() == self.FINE

    def test_backward_dtype(self):
        with mesh_of(2) as mesh:
            x, y, forward, backward = self.moved(mesh, [Shard(0)], [Shard(1)], backward_dtype=torch.bfloat16)
            assert (y.dtype, forward, backward) == (torch.float32, {torch.float32}, {torch.bfloat16})
            assert assemble(y.detach()).unique().item() == self.FINE
            assert assemble(x.grad).unique().item() == self.COARSE

    def test_both(self):
        with mesh_of(2) as mesh:
            dtypes = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float64}
            _, y, forward, backward = self.moved(mesh, [Shard(0)], [Shard(1)], **dtypes)
            assert (y.dtype, forward, backward) == (torch.bfloat16, {torch.bfloat16}, {torch.float64})

    def test_without_gradients(self):
        with mesh_of(2) as mesh, Recorder() as recorder:
            x = make_dtensor(torch.full((4, 4), self.FINE), mesh, [Shard(0)], seed=0)
            y = x.redistribute(placements=[Replicate()], forward_dtype=torch.float16)
            assert (y.dtype, y.to_local().dtype, recorder.dtypes) == (torch.float16, torch.float16, {torch.float16})

    def test_where_nothing_moves(self):
        with mesh_of(2) as mesh:
            x = make_dtensor(torch.full((4, 4), self.FINE), mesh, [Shard(0)], seed=0)
            y = x.redistribute(placements=[Shard(0)], forward_dtype=torch.bfloat16)
            assert same(assemble(y), torch.full((4, 4), self.COARSE, dtype=torch.bfloat16))


# ---- from_local ----------------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_from_local(mesh, shape, placements):
    value, w = numbers(shape), numbers(shape)
    local = local_parts(value, mesh, placements).requires_grad_()
    x = DTensor.from_local(local, mesh, placements, shape=shape, stride=(shape[1], 1))
    assert torch.equal(assemble(x.detach()), value)
    (x.full_tensor() * w).sum().backward()
    # Cut as the tensor is; an operand of a sum gets the whole gradient, and so does every replica.
    expected = local_parts(w, mesh, cotangent(placements))
    assert all(map(torch.equal, local.grad.shards, expected.shards))


def test_from_local_takes_shards_for_even(mesh):
    local = local_parts(numbers((5, 4)), mesh, [Shard(0), Shard(1)])
    with pytest.raises(ShapeError, match=r"assumes shards of equal shape.*pass shape=.*run_check=True"):
        DTensor.from_local(local, mesh, [Shard(0), Shard(1)])


def test_from_local_finds_uneven_shapes_with_run_check(mesh):
    value, w = numbers((5, 4)), numbers((5, 4))
    local = local_parts(value, mesh, [Shard(0), Shard(1)]).requires_grad_()
    x = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], run_check=True)
    assert x.shape == (5, 4)
    (x.full_tensor() * w).sum().backward()
    assert all(map(torch.equal, local.grad.shards, local_parts(w, mesh, [Shard(0), Shard(1)]).shards))


def test_from_local_run_check_copies_the_first_rank(mesh):
    # Replicas that differ become what the first rank of the axis has; gradients still reach each rank's own tensor.
    local = RankTensor([torch.full((4,), float(rank), dtype=torch.float64) for rank in range(6)], requires_grad=True)
    x = DTensor.from_local(local, mesh, [Replicate(), Replicate()], run_check=True)
    assert torch.equal(assemble(x.detach()), torch.zeros(4, dtype=torch.float64))
    w = numbers((4,))
    (x.full_tensor() * w).sum().backward()
    assert all(torch.equal(shard, w) for shard in local.grad.shards)


@shapes
def test_from_local_grad_placements(mesh, shape):
    # A replicated input whose gradient is wanted as a sum: what the ranks get adds up to the gradient, once.
    w = numbers(shape)
    local = local_parts(numbers(shape), mesh, [Replicate(), Replicate()]).requires_grad_()
    x = DTensor.from_local(local, mesh, [Replicate(), Replicate()], grad_placements=[Partial(), Replicate()])
    (x.full_tensor() * w).sum().backward()
    shards = local.grad.shards
    for column in range(3):
        assert torch.equal(shards[column] + shards[3 + column], w)


def test_from_local_of_a_view(mesh):
    # The local tensor is no leaf: gradients flow on into what it was computed from.
    w = numbers((4, 6))
    source = RankTensor([numbers((2, 4)) for _ in range(6)], requires_grad=True)
    x = DTensor.from_local((source * 2).t(), mesh, [Replicate(), Shard(1)], shape=(4, 6), stride=(6, 1))
    (x.full_tensor() * w).sum().backward()
    for rank, shard in enumerate(source.grad.shards):
        column = 2 * (rank % 3)
        assert torch.equal(shard, 2 * w[:, column : column + 2].t())


# ---- to_local and full_tensor ----------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_to_local(mesh, shape, placements):
    x, w = leaf_of(numbers(shape), mesh, placements), numbers(shape)
    local = x.to_local()
    assert local.requires_grad
    (local * local_parts(w, mesh, cotangent(placements))).sum().backward()
    assert x.grad.placements == cotangent(placements)
    assert torch.equal(assemble(x.grad), w)


@shapes
def test_to_local_grad_placements(mesh, shape):
    # Every rank uses the whole tensor in its own way, so that the gradient is the sum of the ranks'.
    x = leaf_of(numbers(shape), mesh, [Replicate(), Replicate()])
    weights, total = per_rank_weights(shape, 6)
    (x.to_local(grad_placements=[Partial(), Partial()]) * weights).sum().backward()
    assert x.grad.placements == x.placements
    assert torch.equal(assemble(x.grad), total)


@shapes
@pytest.mark.parametrize("placements", PAIRS, ids=str)
def test_full_tensor_grad_placements(mesh, shape, placements):
    x = leaf_of(numbers(shape), mesh, placements)
    weights, total = per_rank_weights(shape, 6)
    (x.full_tensor(grad_placements=[Partial(), Partial()]) * weights).sum().backward()
    assert x.grad.placements == cotangent(placements)
    assert torch.equal(assemble(x.grad), total)


def test_full_tensor_of_a_sum_of_averages(mesh):
    # The value of a Partial(avg) tensor is one number; that it is stored as operands is nothing to its gradient.
    x, w = leaf_of(numbers((5, 3)), mesh, [Partial("avg"), Partial("avg")]), numbers((5, 3))
    (x.full_tensor() * w).sum().backward()
    assert torch.equal(assemble(x.grad), w)


def test_products_by_their_other_name(mesh):
    value = numbers((6, 3)).sign()
    x = DTensor.from_local(local_parts(value, mesh, [Partial("prod"), Shard(0)]), mesh, [Partial("prod"), Shard(0)])
    assert x.placements == (Partial("product"), Shard(0))
    assert torch.equal(assemble(x), value)
    assert torch.equal(assemble(x.redistribute(placements=[Shard(1), Partial("prod")])), value)
    assert x.prod(0).placements[1] == Partial("prod")
    assert torch.equal(assemble(x.prod(0)), value.prod(0))
    assert torch.equal(assemble(x.t()), value.t())


AVERAGES = [[Partial("avg"), Replicate()], [Partial("avg"), Partial("avg")], [Partial("avg"), Partial()]]
AVERAGES += [[Partial("avg"), Shard(0)], [Shard(1), Partial("avg")]]


@pytest.mark.parametrize("placements", AVERAGES, ids=str)
def test_averages_to_local_tensors_and_back(mesh, placements):
    # The gradient of a tensor is that of its operands, too, so that a round trip changes nothing.
    value, w = numbers((5, 3)), numbers((5, 3))
    x = leaf_of(value, mesh, placements)
    y = DTensor.from_local(x.to_local(), mesh, placements, shape=(5, 3), stride=(3, 1))
    (y.full_tensor() * w).sum().backward()
    assert x.grad.placements == cotangent(placements)
    assert torch.equal(assemble(x.grad), w)
    x = leaf_of(value, mesh, placements)
    (x.to_local() * local_parts(w, mesh, cotangent(placements))).sum().backward()
    assert torch.equal(assemble(x.grad), w)


@pytest.mark.parametrize("placements", AVERAGES, ids=str)
def test_gradients_of_averages(mesh, placements):
    """Leaves that are averages, and rows written into them, as on one device."""
    value, row = numbers((5, 3)), numbers((3,))
    functions = {
        "select_scatter": lambda x, row: torch.select_scatter(x, row, 0, 1),
        "slice_scatter": lambda x, row: torch.slice_scatter(x, row[None], 0, 2, 3),
        "scaled": lambda x, row: (x * 2).sum(0) + row,
        "product": lambda x, row: x * x * row,
        "written": lambda x, row: (x * 1).index_copy(0, torch.tensor([1]), row[None]),
    }
    for fn in functions.values():
        plain = [value.clone().requires_grad_(), row.clone().requires_grad_()]
        wanted = fn(*plain)
        wanted.square().sum().backward()
        for of_row in ([Replicate(), Replicate()], [Partial("avg"), Replicate()], [Partial(), Partial("avg")]):
            given = [leaf_of(value, mesh, placements), leaf_of(row, mesh, of_row)]
            with shardwise.implicit_replication():
                found = fn(*given)
            found.square().sum().backward()
            torch.testing.assert_close(assemble(found.detach()), wanted.detach())
            for x, one in zip(given, plain, strict=True):
                torch.testing.assert_close(assemble(x.grad), one.grad)


def test_local_round_trip(mesh):
    # Whole to local, something local, and back.
    value, w = numbers((5, 3)), numbers((5, 3))
    x = leaf_of(value, mesh, [Shard(0), Shard(1)])
    y = DTensor.from_local(x.to_local() ** 2, mesh, x.placements, shape=(5, 3), stride=(3, 1))
    assert torch.equal(assemble(y.detach()), value**2)
    (y.full_tensor() * w).sum().backward()
    assert torch.equal(assemble(x.grad), 2 * value * w)


# ---- leaves ---------------------------------------------------------------------------------------------------------


class _Gradient(torch.autograd.Function):
    """Passes a tensor's first local element on, and sends back a gradient with placements of our choice."""

    @staticmethod
    def forward(ctx, x, gradient):
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient, None


def send_back(x, value, placements):
    """A loss whose gradient arrives at `x` with these placements."""
    gradient = make_dtensor(value, x.device_mesh, placements, seed=5)
    return _Gradient.apply(x, gradient)


class TestLeaves:
    @pytest.mark.parametrize("arriving", PAIRS, ids=str)
    def test_grad_takes_the_placements_of_the_leaf(self, mesh, arriving):
        for placements in PAIRS:
            x, w = leaf_of(numbers((5, 3)), mesh, placements), numbers((5, 3))
            send_back(x, w, arriving).backward()
            assert x.grad.placements == cotangent(placements)
            assert torch.equal(assemble(x.grad), w)

    def test_grad_keeps_the_order_of_the_cuts(self, mesh):
        x, w = leaf_of(numbers((12, 3)), mesh, P(("b", "a"))), numbers((12, 3))
        send_back(x, w, [Shard(0), Shard(0)]).backward()
        assert x.grad.shard_order == x.shard_order
        assert torch.equal(assemble(x.grad), w)

    def test_gradients_of_different_placements_add_up(self, mesh):
        x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Replicate()]), [numbers((5, 3)) for _ in range(3)]
        ways = ([Partial(), Shard(1)], [Shard(0), Replicate()], [Replicate(), Partial()])
        sum(send_back(x, part, way) for part, way in zip(w, ways, strict=True)).backward()
        assert x.grad.placements == x.placements
        assert torch.equal(assemble(x.grad), sum(w))

    def test_retained_graph_accumulates(self, mesh):
        x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Partial()]), numbers((5, 3))
        loss = (x.redistribute(placements=[Shard(1), Shard(0)]).full_tensor() * w).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad.placements == cotangent(x.placements)
        assert torch.equal(assemble(x.grad), 2 * w)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    def test_hooks_see_the_gradient_as_the_leaf_is_cut(self, mesh):
        x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Replicate()]), numbers((5, 3))
        seen = []
        x.register_hook(lambda grad: seen.append(grad.placements))
        x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.placements))
        send_back(x, w, [Partial(), Shard(0)]).backward()
        assert seen == [x.placements, x.placements]

    def test_a_hook_may_change_the_gradient(self, mesh):
        x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Replicate()]), numbers((5, 3))
        handle = x.register_hook(lambda grad: grad + grad)
        (x.full_tensor() * w).sum().backward()
        assert torch.equal(assemble(x.grad), 2 * w)
        handle.remove()
        x.grad = None
        (x.full_tensor() * w).sum().backward()
        assert torch.equal(assemble(x.grad), w)

    def test_hook_on_a_result(self, mesh):
        x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Replicate()]), numbers((5, 3))
        y = x.redistribute(placements=[Replicate(), Shard(1)])
        y.register_hook(lambda grad: grad + grad)
        y.retain_grad()
        (y.full_tensor() * w).sum().backward()
        assert torch.equal(assemble(x.grad), 2 * w)
        assert torch.equal(assemble(y.grad), 2 * w)

    def test_autograd_grad(self, mesh):
        x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Partial()]), numbers((5, 3))
        y = x.redistribute(placements=[Shard(1), Shard(0)])
        loss = (y.full_tensor() * w).sum()
        at_x, at_y = torch.autograd.grad(loss, [x, y])
        assert (at_x.placements, at_y.placements) == (cotangent(x.placements), y.placements)
        assert torch.equal(assemble(at_x), w)
        assert torch.equal(assemble(at_y), w)
        assert x.grad is None

    def test_parameters(self, mesh):
        w = numbers((5, 3))
        p = torch.nn.Parameter(make_dtensor(numbers((5, 3)), mesh, [Shard(0), Shard(1)], seed=0))
        assert isinstance(p, torch.nn.Parameter)
        assert isinstance(p, DTensor)
        assert p.requires_grad
        assert p.is_leaf
        send_back(p, w, [Partial(), Partial()]).backward()
        assert p.grad.placements == p.placements
        assert torch.equal(assemble(p.grad), w)
        module = torch.nn.Module()
        module.weight = p
        assert dict(module.named_parameters())["weight"] is p

    def test_setting_data(self, mesh):
        # The wrapper and its local part change together, and gradients follow the new placements.
        p = torch.nn.Parameter(make_dtensor(numbers((5, 3)), mesh, [Shard(0), Shard(1)], seed=0))
        value, w = numbers((5, 3)), numbers((5, 3))
        p.data = make_dtensor(value, mesh, [Replicate(), Shard(0)], seed=0)
        assert p.placements == (Replicate(), Shard(0))
        assert torch.equal(assemble(p.detach()), value)
        send_back(p, w, [Partial(), Partial()]).backward()
        assert p.grad.placements == p.placements
        assert torch.equal(assemble(p.grad), w)

    def test_setting_data_of_another_shape(self, mesh):
        x = make_dtensor(numbers((5, 3)), mesh, [Shard(0), Shard(1)], seed=0)
        value = numbers((2, 7))
        x.data = make_dtensor(value, mesh, [Shard(1), Replicate()], seed=0)
        assert x.shape == (2, 7)
        assert torch.equal(assemble(x), value)

    def test_data_shares_the_values(self, mesh):
        x = leaf_of(numbers((5, 3)), mesh, [Shard(0), Shard(1)])
        assert not x.data.requires_grad
        assert x.data.placements == x.placements
        x.data.copy_(zeros(5, 3, dtype=torch.float64, device_mesh=mesh, placements=x.placements))
        assert not assemble(x.detach()).any()

    def test_setting_data_to_a_plain_tensor_is_refused(self, mesh):
        x = make_dtensor(numbers((5, 3)), mesh, [Shard(0), Shard(1)], seed=0)
        with pytest.raises(InputError, match="distribute it first"):
            x.data = torch.zeros(5, 3)

    def test_distribute_tensor_keeps_requires_grad_and_leaf(self, mesh):
        w = numbers((5, 3))
        plain = numbers((5, 3)).requires_grad_()
        x = distribute_tensor(plain, mesh, [Shard(0), Partial()])
        assert x.requires_grad
        assert x.is_leaf
        (x.full_tensor() * w).sum().backward()
        assert torch.equal(assemble(x.grad), w)
        assert plain.grad is None

    def test_requires_grad_off_and_on(self, mesh):
        # However often it is switched, the gradient is reduced once.
        x, w = make_dtensor(numbers((5, 3)), mesh, [Shard(0), Replicate()], seed=0), numbers((5, 3))
        for on in (True, False, True):
            x.requires_grad = on
        send_back(x, w, [Partial(), Partial()]).backward()
        assert torch.equal(assemble(x.grad), w)

    def test_a_leaf_is_freed(self, mesh):
        # The hook that reduces the gradient lives on the leaf, and must not keep it alive.
        x = leaf_of(numbers((5, 3)), mesh, [Shard(0), Replicate()])
        reference = weakref.ref(x)
        (x.full_tensor() * 2).sum().backward()
        del x
        assert reference() is None

    def test_a_copy_reduces_its_own_gradient(self, mesh):
        x, w = leaf_of(numbers((5, 3)), mesh, [Shard(0), Replicate()]), numbers((5, 3))
        y = copy.deepcopy(x)
        send_back(y, w, [Partial(), Partial()]).backward()
        assert y.grad.placements == x.placements
        assert x.grad is None


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("placements", [[Replicate(), Partial()], [Replicate(), Replicate()], [Shard(0), Replicate()]])
def test_gradients_lie_in_memory_as_their_specs_say(mesh, placements, before) -> None:
    # A tensor that is transposed before or after it is made local gets its gradient in another order of memory; on
    # its way back the gradient is viewed all the same, as on one device.
    weight = torch.arange(24.0).view(6, 4)

    def program(x, local):
        y = x.view(24).view(4, 6)
        y = local(y.transpose(0, 1)) if before else local(y).transpose(0, 1)
        return (y * weight).sum()

    data = torch.randn(4, 6)
    whole = data.clone().requires_grad_()
    program(whole, lambda y: y).backward()
    x = leaf_of(data, mesh, placements)
    program(x, lambda y: y.redistribute(placements=[Replicate(), Replicate()]).to_local()).backward()
    assert torch.allclose(assemble(x.grad), whole.grad)
