"""Plain tensors in backward: what autograd saved and what PyTorch's formulas make is accepted, a user's is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Shard
from shardwise.errors import MixedTensorError
from tests.ops.helpers import on, r, ranks, whole

X, PLAIN = r(6, 4, dtype=torch.float64), r(6, 4, dtype=torch.float64, seed=1)


def mix(tensor: Any) -> Any:
    return tensor * torch.ones(6, 4, dtype=torch.float64)


# ---- a user's code in backward --------------------------------------------------------------------------------------


def tensor_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(mix)
    return y


def tensor_hook_of_a_formula_that_makes_tensors(x: Tensor) -> Tensor:
    y = x.cumprod(0)
    y.register_hook(mix)
    return y


def tensor_hook_of_a_leaf(x: Tensor) -> Tensor:
    x.register_hook(mix)
    return x * 2


def post_accumulate_hook(x: Tensor) -> Tensor:
    def hook(leaf: Tensor) -> None:
        mix(leaf.grad)

    x.register_post_accumulate_grad_hook(hook)
    return x * 2


def node_hook(x: Tensor) -> Tensor:
    y = x.cumprod(0)
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: tuple(map(mix, grad_inputs)))
    return y


def node_prehook(x: Tensor) -> Tensor:
    y = x * 2
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grad_outputs: tuple(map(mix, grad_outputs)))
    return y


def node_prehook_of_a_formula_that_makes_tensors(x: Tensor) -> Tensor:
    y = x.cumprod(0)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grad_outputs: tuple(map(mix, grad_outputs)))
    return y


def node_prehook_of_pieces(x: Tensor) -> Tensor:
    first, _ = x.split(3)
    assert first.grad_fn is not None
    first.grad_fn.register_prehook(lambda grad_outputs: (grad_outputs[0] * PLAIN[:3], None))
    return first * 2


def node_hook_of_pieces(x: Tensor) -> Tensor:
    first, _ = x.split(3)
    assert first.grad_fn is not None
    first.grad_fn.register_hook(lambda grad_inputs, grad_outputs: tuple(map(mix, grad_inputs)))
    return first * 2


def node_hook_of_pieces_that_all_have_gradients(x: Tensor) -> Tensor:
    first, second = x.unbind(1)[:2]
    rest = x.unbind(1)[2:]
    assert first.grad_fn is not None
    first.grad_fn.register_hook(lambda grad_inputs, grad_outputs: tuple(map(mix, grad_inputs)))
    return first + second + rest[0] + rest[1]


def tensor_hook_of_a_piece(x: Tensor) -> Tensor:
    first, _ = x.split(3)
    first.register_hook(lambda gradient: gradient * PLAIN[:3])
    return first * 2


class PlainBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return PLAIN[: gradient.shape[0], : gradient.shape[1]].clone()


def plain_gradient_of_a_piece(x: Tensor) -> Tensor:
    first, second = x.split(3)
    return PlainBackward.apply(first).sum() + second.sum()  # type: ignore[no-untyped-call]


def plain_gradient_of_a_formula_that_makes_tensors(x: Tensor) -> Tensor:
    return PlainBackward.apply(x.cumprod(0))  # type: ignore[no-untyped-call, no-any-return]


def attention(x: Tensor) -> Tensor:
    heads = x[None, None]
    return nn.functional.scaled_dot_product_attention(heads, heads, heads)


NODES_OF_OURS: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda x, index: nn.functional.linear(x, x, x[:, 0]),
    "rms_norm": lambda x, index: nn.functional.rms_norm(x, (4,), x[0]),
    "attention over a sharded sequence": lambda x, index: attention(x),
    "embedding": lambda x, index: nn.functional.embedding(index, x),
    "cross_entropy": lambda x, index: nn.functional.cross_entropy(x[:3], index, reduction="none"),
}
"""Functions whose node of autograd is shardwise's own."""


def tensor_that_was_accepted_before(x: Tensor) -> Tensor:
    with shardwise.implicit_replication():
        x * PLAIN
    y = x * 2
    y.register_hook(lambda gradient: gradient * PLAIN)
    return y


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def module_full_backward_hook(x: Tensor) -> Tensor:
    module = Doubling()
    module.register_full_backward_hook(lambda module, grad_inputs, grad_outputs: tuple(map(mix, grad_inputs)))
    result: Tensor = module(x)
    return result


def module_full_backward_pre_hook(x: Tensor) -> Tensor:
    module = Doubling()
    module.register_full_backward_pre_hook(lambda module, grad_outputs: tuple(map(mix, grad_outputs)))
    result: Tensor = module(x)
    return result


class MixingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return mix(gradient)


class MixingForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return mix(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class MixingBackwardInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return mix(gradient)


def function_before_an_op_that_took_a_plain_tensor(x: Tensor) -> Tensor:
    y: Tensor = MixingBackward.apply(x)  # type: ignore[no-untyped-call]
    with shardwise.implicit_replication():
        z = y * PLAIN
        with torch.no_grad():
            z.mul_(2)
    return z


def function_in_place_after_an_op_that_took_a_plain_tensor(x: Tensor) -> Tensor:
    with shardwise.implicit_replication():
        y = x * PLAIN
        z: Tensor = MixingBackwardInPlace.apply(y)  # type: ignore[no-untyped-call]
    return z


def function_in_place_before_a_write_to_a_view(x: Tensor) -> Tensor:
    y: Tensor = MixingBackwardInPlace.apply(x * 1)  # type: ignore[no-untyped-call]
    with shardwise.implicit_replication():
        y[1].mul_(PLAIN[0])
        with torch.no_grad():
            y.mul_(2)
    return y


def node_hook_of_an_op_that_took_a_plain_tensor(x: Tensor) -> Tensor:
    with shardwise.implicit_replication():
        y = x * PLAIN
        assert y.grad_fn is not None
        y.grad_fn.register_hook(lambda grad_inputs, grad_outputs: tuple(map(mix, grad_inputs)))
    return y


def node_prehook_of_an_op_that_took_a_plain_tensor(x: Tensor) -> Tensor:
    with shardwise.implicit_replication():
        y = x * PLAIN
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grad_outputs: tuple(map(mix, grad_outputs)))
    return y


def unpack_hook(x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor, mix):
        return x * x


def unpack_hook_of_a_formula_that_makes_tensors(x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor, mix):
        return x.cumprod(0)


USERS: list[Callable[[Any], Any]] = [
    tensor_hook,
    tensor_hook_of_a_formula_that_makes_tensors,
    tensor_hook_of_a_leaf,
    post_accumulate_hook,
    node_hook,
    node_prehook,
    node_prehook_of_a_formula_that_makes_tensors,
    node_prehook_of_pieces,
    node_hook_of_pieces,
    node_hook_of_pieces_that_all_have_gradients,
    tensor_hook_of_a_piece,
    plain_gradient_of_a_piece,
    plain_gradient_of_a_formula_that_makes_tensors,
    tensor_that_was_accepted_before,
    module_full_backward_hook,
    module_full_backward_pre_hook,
    MixingBackward.apply,
    function_before_an_op_that_took_a_plain_tensor,
    function_in_place_after_an_op_that_took_a_plain_tensor,
    function_in_place_before_a_write_to_a_view,
    node_hook_of_an_op_that_took_a_plain_tensor,
    node_prehook_of_an_op_that_took_a_plain_tensor,
    unpack_hook,
    unpack_hook_of_a_formula_that_makes_tensors,
]


@pytest.mark.parametrize("build", USERS, ids=lambda build: getattr(build, "__name__", str(build)))
def test_a_plain_tensor_in_the_users_code_is_refused(build: Callable[[Any], Any]) -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        y = build(x)
        with pytest.raises(MixedTensorError):
            y.sum().backward()


def test_a_plain_tensor_in_the_forward_of_a_users_function_is_refused() -> None:
    with ranks(2) as mesh, pytest.raises(MixedTensorError):
        MixingForward.apply(on(mesh, X, Shard(0), grad=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_plain_tensor_in_recomputed_code_is_refused(reentrant: bool) -> None:
    """The forward ran where plain tensors are taken as replicated; the backward, which computes it again, does not."""

    def run(x: Tensor) -> Tensor:
        return mix(x.cumprod(0)).cumprod(0)

    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with shardwise.implicit_replication():
            y = checkpoint(run, x, use_reentrant=reentrant)
        with pytest.raises(MixedTensorError):
            y.sum().backward()
        with shardwise.implicit_replication():
            y = checkpoint(run, x, use_reentrant=reentrant)
            y.sum().backward()
        one = X.clone().requires_grad_()
        run(one).sum().backward()
        assert one.grad is not None
        torch.testing.assert_close(whole(x.grad), one.grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_formulas_in_recomputed_code_work(reentrant: bool) -> None:
    def run(x: Tensor) -> Tensor:
        return x.cumprod(0)[[0, 2, 3]].prod(1)

    one = X.clone().requires_grad_()
    run(one).sum().backward()
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        checkpoint(run, x, use_reentrant=reentrant).sum().backward()
        assert one.grad is not None
        torch.testing.assert_close(whole(x.grad), one.grad)


def test_a_failed_pass_does_not_count_as_running() -> None:
    """A formula that fails never ends; the hooks of its node in the next pass are the user's all the same."""
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        y = x.cumprod(0)
        assert y.grad_fn is not None

        def fail(grad_outputs: Any) -> None:
            raise KeyError

        handle = y.grad_fn.register_prehook(fail)
        with pytest.raises(KeyError):
            y.sum().backward(retain_graph=True)
        handle.remove()
        y.register_hook(mix)
        with pytest.raises(MixedTensorError):
            y.sum().backward()


# ---- what autograd saved --------------------------------------------------------------------------------------------

MASK = PLAIN > 0
INDEX = torch.tensor([3, 1, 0])
SAVED: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x * PLAIN,
    "div": lambda x: x / PLAIN,
    "mm": lambda x: x @ PLAIN.t(),
    "mm with a view": lambda x: x @ PLAIN[1:5].t(),
    "addmm": lambda x: torch.addmm(torch.ones(6, 6, dtype=torch.float64), x, PLAIN.t()),
    "bmm": lambda x: torch.bmm(x[None], PLAIN.t()[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ki", x, PLAIN),
    "index_select": lambda x: x.index_select(0, INDEX),
    "gather": lambda x: x.gather(0, INDEX[:, None]),
    "masked_select": lambda x: x.masked_select(MASK),
    "masked_fill": lambda x: x.masked_fill(MASK, 2.0),
    "where": lambda x: torch.where(MASK, x, PLAIN),
    "index_put": lambda x: x.index_put((INDEX,), PLAIN[:3]),
    "index_put in place": lambda x: x.clone().index_put_((INDEX,), PLAIN[:3]),
    "write to a view": lambda x: write_to_a_view(x),
    "several writes": lambda x: several_writes(x),
    "maximum": lambda x: torch.maximum(x, PLAIN),
    "mse_loss": lambda x: nn.functional.mse_loss(x, PLAIN),
    "pow": lambda x: x.abs() ** PLAIN,
    "atan2": lambda x: torch.atan2(x, PLAIN),
    "xlogy": lambda x: torch.xlogy(x, PLAIN.abs()),
    "lerp": lambda x: torch.lerp(x, x * 2, PLAIN),
    "linear": lambda x: nn.functional.linear(x, PLAIN, PLAIN[:, 0]),
    "embedding": lambda x: nn.functional.embedding(INDEX, x),
    "cross_entropy": lambda x: nn.functional.cross_entropy(x[:3], INDEX),
}


def write_to_a_view(x: Any) -> Any:
    y = x * 1
    y[1].mul_(PLAIN[0])
    y[2:][INDEX] = PLAIN[:3]
    return y


def several_writes(x: Any) -> Any:
    y = x * PLAIN
    y.mul_(x)
    with torch.no_grad():
        y.mul_(1)
    y.add_(PLAIN).mul_(2)
    pieces = [y * 1, y * 2]
    torch._foreach_mul_(pieces, [PLAIN, PLAIN])
    return pieces[0] * pieces[1]


@pytest.mark.parametrize("case", SAVED)
def test_backward_outside_of_the_context(case: str) -> None:
    fn = SAVED[case]
    one = X.clone().requires_grad_()
    fn(one).sum().backward()
    assert one.grad is not None
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with shardwise.implicit_replication():
            y = fn(x)
        y.sum().backward()
        torch.testing.assert_close(whole(x.grad), one.grad)


@pytest.mark.parametrize("case", SAVED)
def test_gradients_of_gradients_outside_of_the_context(case: str) -> None:
    fn = SAVED[case]

    def twice(x: Any, y: Any) -> Any:
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    one = X.clone().requires_grad_()
    wanted = twice(one, fn(one))
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with shardwise.implicit_replication():
            y = fn(x)
        torch.testing.assert_close(whole(twice(x, y)), wanted)


@pytest.mark.parametrize("inner", ["the user's hooks", "implicit_replication"])
@pytest.mark.parametrize("case", SAVED)
def test_unpack_hooks_of_an_op_that_took_a_plain_tensor(case: str, inner: str) -> None:
    """They run while its formula reads what was saved, and are no part of the formula."""
    called = []
    with ranks(2) as mesh:
        x, other = on(mesh, X, Shard(0), grad=True), on(mesh, X, Shard(1))

        def unpack(saved: Tensor) -> Tensor:
            with pytest.raises(MixedTensorError):
                other * PLAIN
            called.append(saved)
            return saved

        contexts = [shardwise.implicit_replication(), saved_tensors_hooks(lambda tensor: tensor, unpack)]
        with contexts[inner == "implicit_replication"], contexts[inner != "implicit_replication"]:
            y = SAVED[case](x)
        y.sum().backward()
        one = X.clone().requires_grad_()
        SAVED[case](one).sum().backward()
        assert one.grad is not None
        torch.testing.assert_close(whole(x.grad), one.grad)
    assert called


def test_an_unpack_hook_of_one_saved_tensor() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with shardwise.implicit_replication():
            y: Any = x.abs() ** PLAIN
        y.grad_fn._raw_saved_self.register_hooks(lambda tensor: tensor, mix)
        with pytest.raises(MixedTensorError):
            y.sum().backward()


INDEXED: dict[str, Callable[[Any], Any]] = {
    "a list": lambda x: x[[0, 2]],
    "a plain tensor": lambda x: x[INDEX],
    "a plain mask": lambda x: x[MASK[:, 0]],
    "two": lambda x: x[[0, 1], [2, 3]],
    "of a view": lambda x: x[1:][[0, 2]],
}


@pytest.mark.parametrize("case", INDEXED)
def test_plain_indices(case: str) -> None:
    fn = INDEXED[case]
    one = X.clone().requires_grad_()
    fn(one).square().sum().backward()
    assert one.grad is not None
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        fn(x).square().sum().backward()
        torch.testing.assert_close(whole(x.grad), one.grad)


def test_a_tensor_that_was_accepted_before_is_not_accepted_again() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with shardwise.implicit_replication():
            x * PLAIN
        with pytest.raises(MixedTensorError):
            x * PLAIN


def test_a_plain_gradient_from_the_user_is_refused() -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        y = x * x
        with pytest.raises(MixedTensorError):
            y.backward(PLAIN.clone())


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("case", NODES_OF_OURS)
def test_a_plain_gradient_that_arrives_at_a_node_of_ours(case: str, placement: Shard, create_graph: bool) -> None:
    """It is refused, unless the user says that it is replicated."""
    fn, one = NODES_OF_OURS[case], X.clone().requires_grad_()
    expected = fn(one, INDEX)
    plain = r(*expected.shape, dtype=torch.float64, seed=2)
    with ranks(2) as mesh:
        x = on(mesh, X, placement, grad=True)
        y = fn(x, on(mesh, INDEX))
        for _ in range(2):
            with pytest.raises(MixedTensorError):
                torch.autograd.grad(y, x, plain, retain_graph=True, create_graph=create_graph)
            with shardwise.implicit_replication():
                (found,) = torch.autograd.grad(y, x, plain, retain_graph=True, create_graph=create_graph)
            torch.testing.assert_close(whole(found), torch.autograd.grad(expected, one, plain, retain_graph=True)[0])


@pytest.mark.parametrize("case", ["linear", "rms_norm", "attention over a sharded sequence"])
def test_a_plain_gradient_and_plain_saved_tensors_are_refused(case: str) -> None:
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(0), grad=True)
        with saved_tensors_hooks(lambda tensor: tensor.shape, lambda shape: torch.ones(shape, dtype=torch.float64)):
            y = NODES_OF_OURS[case](x, None)
        with pytest.raises(MixedTensorError):
            torch.autograd.grad(y, x, torch.ones(y.shape, dtype=torch.float64))


@pytest.mark.parametrize("create_graph", [False, True])
def test_pieces_without_gradients(create_graph: bool) -> None:
    """Zeros are filled in for them, by PyTorch, in any backward pass over the graph, also after one that failed."""

    def run(x: Any) -> Any:
        first, _, third = x.split(2)
        return (first * third).square().sum() + x.unbind(1)[2].square().sum()

    one = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(one), one, create_graph=create_graph)
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(1), grad=True)
        y = run(x)

        def fail(gradient: Any) -> None:
            raise KeyError

        handle = x.register_hook(fail)
        with pytest.raises(KeyError):
            y.backward(retain_graph=True)
        handle.remove()
        for _ in range(2):
            (found,) = torch.autograd.grad(y, x, create_graph=create_graph, retain_graph=True)
            torch.testing.assert_close(whole(found), expected.detach())
        if create_graph:
            torch.testing.assert_close(
                whole(torch.autograd.grad(found.square().sum(), x)[0]),
                torch.autograd.grad(expected.square().sum(), one)[0],
            )


def test_a_prehook_may_use_plain_tensors_where_the_user_says_that_they_are_replicated() -> None:
    def hook(gradients: Any) -> Any:
        with shardwise.implicit_replication():
            return tuple(gradient if gradient is None else gradient * PLAIN[:3] for gradient in gradients)

    one = X.clone().requires_grad_()
    (one.split(3)[0] * PLAIN[:3]).sum().backward()
    with ranks(2) as mesh:
        x = on(mesh, X, Shard(1), grad=True)
        first, _ = x.split(3)
        assert first.grad_fn is not None
        handle = first.grad_fn.register_prehook(hook)
        (first * 1).sum().backward(retain_graph=True)
        assert one.grad is not None
        torch.testing.assert_close(whole(x.grad), one.grad)
        handle.remove()
        x.grad = None
        (first * 1).sum().backward()
        torch.testing.assert_close(whole(x.grad)[:3], torch.ones(3, 4, dtype=torch.float64))
