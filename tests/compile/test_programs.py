"""Small programs of many kinds: compiled, with graph breaks where they must be, they do what they do without it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Replicate, Shard
from shardwise._torch import pytree
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.compile.cases import MLP, Make
from tests.worlds import lone_rank

# PyTorch's own, while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
PROGRAMS: dict[str, Callable[[Make], None]] = {}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def program(body: Callable[[Make], None]) -> Callable[[Make], None]:
    PROGRAMS[body.__name__] = body
    return body


@pytest.mark.parametrize("name", PROGRAMS, ids=str)
def test_program(name: str) -> None:
    with lone_rank() as mesh:
        PROGRAMS[name](Make(mesh))


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager")


def same(one: object, other: object) -> None:
    """Compare tensors by their local values, and all else by equality."""
    for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        if isinstance(a, Tensor):
            local = [t.to_local() if isinstance(t, DTensor) else t for t in (a.detach(), b.detach())]
            torch.testing.assert_close(*local, rtol=1e-5, atol=1e-5)
        else:
            assert a == b


def check(function: Any, *args: Any, **kwargs: Any) -> None:
    same(function(*args, **kwargs), compiled(function)(*args, **kwargs))


def styled(d: Make) -> nn.Module:
    return parallelize_module(MLP(), d.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@program
def a_value_in_the_middle(d: Make) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        return y * y.sum().item()

    check(function, d(8, 4))


@program
def text(d: Make) -> None:
    def function(x: DTensor) -> tuple[str, Tensor]:
        y = x.relu()
        print("", end="")
        return str(y.spec), y + 1  # type: ignore[attr-defined]

    check(function, d(8, 4))


@program
def writes_in_place(d: Make) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.detach().clone()
        y.add_(1).mul_(2)
        y[:, 1] += 3
        return y

    check(function, d(8, 4))


@program
def several_views(d: Make) -> None:
    check(lambda x: (x.t()[1:3].flatten(), x.unfold(1, 2, 1), x.view(-1), x.narrow(0, 0, 4)), d(8, 4, on=Replicate()))


@program
def lists_and_names(d: Make) -> None:
    def function(xs: list[Tensor], *, scale: int, more: dict[str, Tensor]) -> object:
        return [x * scale for x in xs], torch.stack(xs).sum(0), torch.where(more["mask"], xs[0], xs[1])

    xs = [d(8, 4), d(8, 4)]
    check(function, xs, scale=3, more={"mask": xs[0] > 0})


@program
def nested_modules(d: Make) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([styled(d) for _ in range(2)])
            self.norm = nn.LayerNorm(8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for layer in self.layers:
                x = x + layer(self.norm(x))
            return x

    check(Counting(), torch.randn(4, 8))


@program
def a_compiled_optimizer(d: Make) -> None:
    start = torch.randn(8, 4)
    for options in ({"foreach": True}, {"foreach": False}):
        found = []
        for wrap in (lambda step: step, compiled):
            weight = nn.Parameter(d.of(start, Shard(0)))
            optimizer = torch.optim.Adam([weight], lr=0.1, **options)
            step = wrap(optimizer.step)
            for _ in range(3):
                optimizer.zero_grad()
                (weight * weight).sum().backward()
                step()
            found.append(weight)
        same(*found)


@program
def without_gradients(d: Make) -> None:
    def inference(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x * 2
        return y.sum(1)

    check(torch.no_grad()(lambda x: (x * 2).softmax(1)), d(8, 4))
    check(inference, d(8, 4))


@program
def autocast(d: Make) -> None:
    weight = d(4, 8, on=Replicate())

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ weight
        return y.float().sum(1)

    check(function, d(8, 4))


@program
def hooks(d: Make) -> None:
    module = styled(d)
    module.up.register_forward_hook(lambda module, args, result: result * 2)
    module.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    check(module, torch.randn(4, 8))
    x = d(8, 4)

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        return (y * y).sum()

    grads = []
    for run in (function, compiled(function)):
        x.grad = None
        run(x).backward()
        grads.append(x.grad)
    same(*grads)


@program
def state_outside(d: Make) -> None:
    state, added = {"calls": 0}, d(8, 4)

    def function(x: Tensor) -> Tensor:
        state["calls"] += 1
        return x + added if state["calls"] > 1 else x - added

    x, run = d(8, 4), compiled(function)
    eager = function(x), function(x)
    state["calls"] = 0
    same(eager, (run(x), run(x)))


@program
def questions_about_tensors(d: Make) -> None:
    def function(x: Tensor) -> object:
        if isinstance(x, DTensor) and x.placements[0].is_shard():
            return x.to_local() * x.device_mesh.size(), x.numel(), x.stride(), x.dtype, x.is_contiguous()
        return x

    check(function, d(8, 4))


@program
def gradients_of_gradients(d: Make) -> None:
    def function(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return grad.sum(1)

    check(function, d(8, 4))


@program
def a_clipped_step(d: Make) -> None:
    start, batch = copy.deepcopy(MLP().state_dict()), torch.randn(4, 8)

    def losses(wrap: Callable[[Any], Any]) -> list[Tensor]:
        module = MLP()
        module.load_state_dict(start)
        parallelize_module(module, d.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = module(batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            return loss.detach()

        run = wrap(step)
        return [run() for _ in range(2)]

    same(losses(lambda step: step), losses(compiled))


@program
def shapes_that_depend_on_data(d: Make) -> None:
    check(lambda x: (x.nonzero(), x[x > 0].sum()), d(8, 4, on=Replicate()))


@program
def generators_and_checkpoints(d: Make) -> None:
    module = styled(d)

    def pieces(x: Tensor) -> Iterator[Tensor]:
        for factor in range(3):
            yield checkpoint(module, x * factor, use_reentrant=False)

    check(lambda x: sum(pieces(x)), torch.randn(4, 8, requires_grad=True))


@program
def copies_of_modules(d: Make) -> None:
    module, x = styled(d), torch.randn(4, 8)
    run = compiled(module)
    same(run(x), compiled(copy.deepcopy(module))(x))
    assert len(run.state_dict()) == 4


@program
def transforms(d: Make) -> None:
    check(lambda x: torch.vmap(lambda row: (row * row).sum())(x), d(8, 4))
