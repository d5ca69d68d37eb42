"""local_map: functions on distributed tensors from functions on local ones."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, local_map
from shardwise.errors import InputError, PlacementError, ShapeError
from shardwise.testing import assemble, make_dtensor

ROW, COLUMN, REPLICATED, SUM = [Shard(0)], [Shard(1)], [Replicate()], [Partial()]
torch.manual_seed(0)
X, W = torch.randn(5, 4), torch.randn(4, 3)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with shardwise.simulate(2):
        yield init_device_mesh("cpu", (2,))


def on(mesh: DeviceMesh, value: Tensor, placements: Any, grad: bool = False) -> DTensor:
    made = make_dtensor(value, mesh, placements, seed=0)
    return made.requires_grad_() if grad else made


def product(x: Tensor, w: Tensor) -> Tensor:
    assert not isinstance(x, DTensor)
    return x @ w


def gradients_match(result: DTensor, leaves: list[DTensor], plain: Tensor, plain_leaves: list[Tensor]) -> None:
    result.sum().full_tensor().backward()
    plain.sum().backward()
    for leaf, wanted in zip(leaves, plain_leaves, strict=True):
        assert isinstance(leaf.grad, DTensor)
        assert leaf.grad.placements == leaf.placements
        torch.testing.assert_close(assemble(leaf.grad), wanted.grad)


def test_callables_without_a_name(mesh: DeviceMesh) -> None:
    x, linear = on(mesh, X, ROW), torch.nn.Linear(4, 3)
    for func, wanted in ((functools.partial(product, w=W), X @ W), (linear, linear(X))):
        torch.testing.assert_close(assemble(local_map(func, out_placements=ROW)(x)), wanted)
        with pytest.raises(InputError, match=rf"2 in_placements for 1 arguments of {type(func).__name__}"):
            local_map(func, out_placements=ROW, in_placements=(ROW, ROW))(x)


@pytest.mark.parametrize(
    ("given", "result"),
    [
        ((ROW, REPLICATED), ROW),
        ((COLUMN, ROW), SUM),
        ((REPLICATED, COLUMN), COLUMN),
        ((REPLICATED, REPLICATED), REPLICATED),
    ],
)
def test_values(mesh: DeviceMesh, given: Any, result: Any) -> None:
    mapped = local_map(product, out_placements=result, in_placements=given)
    found = mapped(on(mesh, X, given[0]), on(mesh, W, given[1]))
    assert found.placements == tuple(result)
    torch.testing.assert_close(assemble(found), X @ W)


def test_uneven_results(mesh: DeviceMesh) -> None:
    """They have the size of the input that is sharded over the same axis, if that is one size; else `func` says it."""
    x, y = on(mesh, X, ROW), on(mesh, torch.randn(7, 4), ROW)
    padded = local_map(lambda x: x.new_zeros(3, 4), out_placements=ROW)
    with pytest.raises(ShapeError, match=r"result 0 of <lambda>.*rank 1 holds \[3, 4\] instead of \[2, 4\].*shape="):
        padded(x)
    with pytest.raises(ShapeError, match=r"inputs of sizes \[5, 7\], unevenly.*return a DTensor from the function"):
        local_map(lambda x, y: y, out_placements=ROW)(x, y)
    other = local_map(lambda x, y: DTensor.from_local(y, mesh, ROW, shape=(7, 4)), out_placements=ROW)
    torch.testing.assert_close(assemble(other(x, y)), assemble(y))
    rows = local_map(lambda x: x.new_ones(1), out_placements=ROW)(on(mesh, torch.randn(6, 4), ROW))
    assert rows.shape == (2,)


def test_gradients(mesh: DeviceMesh) -> None:
    """Each rank computes a term of the gradient of a replicated operand: in_grad_placements has a Partial for it."""
    mapped = local_map(product, out_placements=ROW, in_placements=(ROW, REPLICATED), in_grad_placements=(ROW, SUM))
    x, w = on(mesh, X, ROW, grad=True), on(mesh, W, REPLICATED, grad=True)
    plain = X.clone().requires_grad_(), W.clone().requires_grad_()
    gradients_match(mapped(x, w), [x, w], product(*plain), list(plain))


def test_gradients_of_a_sum_over_ranks(mesh: DeviceMesh) -> None:
    mapped = local_map(product, out_placements=SUM, in_placements=(COLUMN, ROW))
    x, w = on(mesh, X, COLUMN, grad=True), on(mesh, W, ROW, grad=True)
    plain = X.clone().requires_grad_(), W.clone().requires_grad_()
    gradients_match(mapped(x, w), [x, w], product(*plain), list(plain))


def test_as_a_decorator(mesh: DeviceMesh) -> None:
    @local_map(out_placements=ROW, in_placements=(ROW, None))
    def scaled(x: Tensor, by: float) -> Tensor:
        """Documented."""
        return x * by

    assert scaled.__doc__ == "Documented."
    torch.testing.assert_close(assemble(scaled(on(mesh, X, ROW), 2.0)), X * 2)


def test_several_results_and_some_that_are_no_tensors(mesh: DeviceMesh) -> None:
    def stats(x: Tensor, name: str) -> tuple[Tensor, str, Tensor]:
        return x + 1, name.upper(), x.sum(0)

    mapped = local_map(stats, out_placements=(ROW, None, SUM), in_placements=(ROW, None))
    more, name, total = mapped(on(mesh, X, ROW), "abc")
    assert name == "ABC"
    torch.testing.assert_close(assemble(more), X + 1)
    torch.testing.assert_close(assemble(total), X.sum(0))


def test_no_tensor_at_all(mesh: DeviceMesh) -> None:
    assert local_map(lambda x: 7, out_placements=None, in_placements=(ROW,))(on(mesh, X, ROW)) == 7


def test_nested_arguments_and_keywords(mesh: DeviceMesh) -> None:
    def total(pair: list[Tensor], *, scale: float) -> Tensor:
        return (pair[0] + pair[1]) * scale

    mapped = local_map(total, out_placements=ROW, in_placements=(ROW, ROW))
    torch.testing.assert_close(assemble(mapped([on(mesh, X, ROW), on(mesh, X, ROW)], scale=3.0)), X * 6)


def test_plain_tensors_alone_stay_plain() -> None:
    mapped = local_map(product, out_placements=ROW, in_placements=(None, None))
    torch.testing.assert_close(mapped(X, W), X @ W)


def test_redistribute_inputs(mesh: DeviceMesh) -> None:
    mapped = local_map(product, out_placements=SUM, in_placements=(COLUMN, ROW), redistribute_inputs=True)
    x, w = on(mesh, X, ROW, grad=True), on(mesh, W, SUM, grad=True)
    plain = X.clone().requires_grad_(), W.clone().requires_grad_()
    result = mapped(x, w)
    torch.testing.assert_close(assemble(result.detach()), X @ W)
    result.sum().full_tensor().backward()
    product(*plain).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor().shards[0], plain[0].grad)
    torch.testing.assert_close(w.grad.full_tensor().shards[0], plain[1].grad)


def test_without_in_placements_anything_goes(mesh: DeviceMesh) -> None:
    mapped = local_map(lambda x: x * 2, out_placements=COLUMN)
    torch.testing.assert_close(assemble(mapped(on(mesh, X, COLUMN))), X * 2)


@pytest.mark.parametrize(
    ("options", "given", "error", "said"),
    [
        (
            {"in_placements": (ROW,)},
            (ROW, REPLICATED),
            InputError,
            "1 in_placements for 2 arguments of product: "
            "give one for each argument, None for those that are not DTensors",
        ),
        (
            {"in_placements": (ROW, REPLICATED), "in_grad_placements": (ROW,)},
            (ROW, REPLICATED),
            InputError,
            "1 in_grad_placements for 2 arguments of product: "
            "give one for each argument, None for those that are not DTensors",
        ),
        (
            {"in_placements": (ROW, None)},
            (ROW, REPLICATED),
            InputError,
            "argument 1 of product is a DTensor, but its entry of in_placements is None: "
            "give its placements: in_placements[1] = [Replicate()]",
        ),
        (
            {"in_placements": (ROW, REPLICATED)},
            (COLUMN, REPLICATED),
            PlacementError,
            "argument 0 of product is f32[5, 4@0], not [Shard(dim=0)]: "
            "redistribute it, or pass redistribute_inputs=True",
        ),
        (
            {"out_placements": (ROW, ROW)},
            (ROW, REPLICATED),
            InputError,
            "2 out_placements for 1 results of product: give a tuple with one placement list for each result, "
            "None for those that are not tensors",
        ),
        (
            {"out_placements": None},
            (ROW, REPLICATED),
            InputError,
            "result 0 of product is a tensor, but its out_placements are None: "
            "give its placements, as in out_placements=[Shard(0)]",
        ),
    ],
)
def test_mistakes(mesh: DeviceMesh, options: dict[str, Any], given: Any, error: type, said: str) -> None:
    mapped = local_map(product, **{"out_placements": ROW, **options})
    with pytest.raises(error) as caught:
        mapped(on(mesh, X, given[0]), on(mesh, W, given[1]))
    assert str(caught.value) == said
