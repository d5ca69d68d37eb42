"""RNN, GRU and LSTM with all their options on distributed tensors: the one-device answer, forward and backward."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from shardwise import Placement, Replicate, Shard, distribute_tensor
from shardwise.errors import MixedTensorError
from tests.nn.compare import compare
from tests.ops.helpers import on, r, ranks, whole

KINDS = (nn.RNN, nn.GRU, nn.LSTM)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bidirectional": True},
    {"num_layers": 3, "dropout": 0.5},
    {"num_layers": 2, "bias": False, "batch_first": True},
]
CASES = [(kind, options) for kind, options in itertools.product(KINDS, OPTIONS)]
CASES += [(nn.RNN, {"nonlinearity": "relu", "num_layers": 2})]
CASES += [(nn.LSTM, {"proj_size": 2, **options}) for options in OPTIONS[:4]]


def name_of(case: Any) -> str:
    return f"{case[0].__name__} {case[1]}"


def made(kind: type[nn.RNNBase], options: dict[str, Any]) -> nn.RNNBase:
    torch.manual_seed(0)
    return kind(3, 4, dtype=torch.float64, **options)


def first_state(module: nn.RNNBase, batch: int) -> Any:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    h = r(layers, batch, module.proj_size or 4, dtype=torch.float64, seed=3).requires_grad_()
    if not isinstance(module, nn.LSTM):
        return h
    return h, r(layers, batch, 4, dtype=torch.float64, seed=4).requires_grad_()


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("with_state", [False, True], ids=["", "first state given"])
def test_sequences(case: Any, with_state: bool) -> None:
    module = made(*case)
    x = r(2, 5, 3, dtype=torch.float64).requires_grad_() if module.batch_first else r(5, 2, 3, dtype=torch.float64)
    args = (x, first_state(module, 2)) if with_state else (x,)
    for seed, sizes in enumerate(((2, 2), (3,))):
        with ranks(*sizes) as mesh:
            compare(module, args, {}, mesh, seed, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_one_sequence_without_a_batch(kind: Any) -> None:
    with ranks(2) as mesh:
        compare(made(kind, {}), (r(5, 3, dtype=torch.float64),), {}, mesh, 1, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell], ids=lambda kind: kind.__name__)
def test_cells(kind: Any) -> None:
    torch.manual_seed(0)
    with ranks(2, 2) as mesh:
        compare(kind(3, 4, dtype=torch.float64), (r(2, 3, dtype=torch.float64),), {}, mesh, 1, rtol=1e-8, atol=1e-10)


PACKED = [case for case in CASES if "batch_first" not in case[1]]


@pytest.mark.parametrize("case", PACKED, ids=name_of)
@pytest.mark.parametrize("lengths", [[5, 3, 3, 1], [2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_packed_sequences(case: Any, lengths: list[int], placement: Placement) -> None:
    module = made(*case)
    packed = pack_padded_sequence(r(5, 4, 3, dtype=torch.float64), torch.tensor(lengths))

    def run(module: nn.Module, data: Any, sizes: Any, state: Any) -> list[Any]:
        torch.manual_seed(1)
        output, last = module(PackedSequence(data, sizes), state)
        results = [output.data, *(last if isinstance(last, tuple) else (last,))]
        sum(result.square().sum() for result in results).backward()
        return [*results, data.grad, *(parameter.grad for parameter in module.parameters())]

    state = first_state(module, 4)
    wanted = run(copy.deepcopy(module), packed.data.clone().requires_grad_(), packed.batch_sizes, state)
    with ranks(2) as mesh:
        many = copy.deepcopy(module)
        for name, parameter in list(many.named_parameters()):
            setattr(many, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        states = [on(mesh, part.detach(), Replicate()) for part in (state if isinstance(state, tuple) else (state,))]
        given = tuple(states) if isinstance(state, tuple) else states[0]
        found = run(many, on(mesh, packed.data, placement, grad=True), packed.batch_sizes, given)
        for mine, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(whole(mine), plain.detach())


def test_a_plain_first_state_is_refused() -> None:
    with ranks(2) as mesh:
        module = made(nn.GRU, {})
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
        x = on(mesh, r(5, 2, 3, dtype=torch.float64), Shard(1))
        with pytest.raises(MixedTensorError):
            module(x, torch.zeros(1, 2, 4, dtype=torch.float64))


def test_plain_parameters_are_refused() -> None:
    """They may differ from rank to rank, and their gradients would be lost."""
    with ranks(2) as mesh, pytest.raises(MixedTensorError):
        made(nn.LSTM, {})(on(mesh, r(5, 2, 3, dtype=torch.float64), Shard(1)))


def test_no_global_switch_is_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may be computing with fused kernels."""

    def refuse(enabled: bool) -> None:
        raise AssertionError("a global switch was flipped")

    with ranks(2) as mesh:
        module = made(nn.LSTM, {})
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
        monkeypatch.setattr(torch._C, "_set_mkldnn_enabled", refuse)
        monkeypatch.setattr(torch._C, "_set_cudnn_enabled", refuse)
        assert module(on(mesh, r(5, 2, 3, dtype=torch.float64), Shard(1)))[0].shape == (5, 2, 4)
