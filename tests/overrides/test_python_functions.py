"""PyTorch's functions in Python are wrapped in place; on plain tensors, and for its compilers, they are as before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import Shard
from shardwise._torch.python_functions import functions_that_make_tensors
from shardwise.errors import MixedTensorError
from shardwise.overrides.python_functions import install_python_functions, uninstall_python_functions
from tests.ops.helpers import on, r, ranks


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    install_python_functions()
    yield
    install_python_functions()


def test_uninstall_restores_them() -> None:
    places = functions_that_make_tensors()
    wrapped = [getattr(place.owner, place.name) for place in places]
    install_python_functions()  # once is enough
    assert [getattr(place.owner, place.name) for place in places] == wrapped
    uninstall_python_functions()
    originals = [getattr(place.owner, place.name) for place in places]
    assert all(wrapper.__wrapped__ is original for wrapper, original in zip(wrapped, originals, strict=True))
    assert not any(hasattr(original, "__wrapped__") and original in wrapped for original in originals)


class Bags(nn.Module):
    def forward(self, indices: Tensor, weight: Tensor) -> Tensor:
        return F.embedding_bag(indices, weight)


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.fractional_max_pool2d(x, 2, output_size=2)


SEQUENCE = r(5, 2, 4)
INDICES = torch.tensor([[0, 1], [2, 3]])
SCRIPTED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "LSTMCell": (lambda: nn.LSTMCell(4, 3), (r(2, 4),)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), (r(2, 4),)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), (SEQUENCE, SEQUENCE, SEQUENCE)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(5, 3), (INDICES,)),
    "embedding_bag": (Bags, (INDICES, r(5, 3))),
    "fractional_max_pool2d": (Pool, (r(1, 1, 5, 5),)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", SCRIPTED)
def test_plain_modules_are_scripted(case: str) -> None:
    make, args = SCRIPTED[case]
    module = make()
    torch.manual_seed(0)
    wanted = module(*args)
    torch.manual_seed(0)
    torch.testing.assert_close(torch.jit.script(module)(*args), wanted)


@pytest.mark.filterwarnings("ignore")
def test_an_lstm_is_scripted() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    layer = Layer()
    torch.testing.assert_close(torch.jit.script(layer)(SEQUENCE), layer(SEQUENCE))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["LSTMCell", "MultiheadAttention", "embedding_bag"])
def test_plain_modules_are_compiled(case: str) -> None:
    make, args = SCRIPTED[case]
    module = make()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), module(*args))


@pytest.mark.filterwarnings("ignore")
def test_a_masked_mean_is_compiled() -> None:
    compiled = torch.compile(lambda x: torch.masked.mean(x, 0), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(SEQUENCE), SEQUENCE.mean(0))


def refused(mesh: Any, plain: Tensor) -> dict[str, Callable[[], Any]]:
    x = on(mesh, r(4, 4), Shard(0))
    attention = nn.MultiheadAttention(4, 2)
    return {
        "masked mean": lambda: torch.masked.mean(x, 0, mask=plain > 0),
        "masked variance": lambda: torch.masked.var(x, 0, mask=plain > 0),
        "attention": lambda: attention(x, x, x),
        "embedding_bag": lambda: F.embedding_bag(on(mesh, INDICES, Shard(0)), plain),
        "GRUCell": lambda: nn.GRUCell(4, 4)(x),
        "fractional_max_pool2d": lambda: F.fractional_max_pool2d(
            on(mesh, r(2, 1, 5, 5), Shard(0)), 2, output_size=2, _random_samples=r(2, 1, 2).abs()
        ),
    }


@pytest.mark.parametrize("case", ["masked mean", "masked variance", "attention", "embedding_bag", "GRUCell"])
def test_given_plain_tensors_are_refused(case: str) -> None:
    with ranks(2) as mesh, pytest.raises(MixedTensorError):
        refused(mesh, r(4, 4))[case]()


def test_functions_are_wrapped_when_shardwise_is_imported() -> None:
    """Who imports one by name before the first mesh is made gets the wrapped one."""
    program = "import torch, shardwise; assert hasattr(torch.masked.mean, '__wrapped__'); print('wrapped')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "wrapped"
