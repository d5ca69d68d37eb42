"""lstm, gru, rnn_tanh and rnn_relu, step by step, from ops that have rules.

PyTorch picks a fused kernel for them before autograd sees the call. Such a kernel reads the memory of its tensors, but
a distributed tensor has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import pytree
from .._torch.above_autograd import Keys, call_original
from .._torch.ops import OpOverload, overload_name
from ..sharding.base import DTensorBase
from .op import Override
from .registry import definitions_in, resolve

define = definitions_in(__name__)

State = tuple[Tensor, ...]
"""The state of one cell: (h,), or (h, c) for an lstm. Rows are the sequences of the batch."""


class _Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None


class _Options(NamedTuple):
    """The arguments that all these functions end with."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


Cell = Callable[[Tensor, State, _Weights], State]
"""(what the step's input adds to the gates, the state before, weights) -> the state after."""


# ---- cells ----------------------------------------------------------------------------------------------------------


def _lstm_cell(from_input: Tensor, state: State, weights: _Weights) -> State:
    h, c = state
    gates = from_input + F.linear(h, weights.hidden, weights.hidden_bias)
    i, f, g, o = torch.unsafe_chunk(gates, 4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if weights.projection is None else F.linear(h, weights.projection), c


def _gru_cell(from_input: Tensor, state: State, weights: _Weights) -> State:
    (h,) = state
    input_reset, input_update, input_new = torch.unsafe_chunk(from_input, 3, -1)
    from_hidden = F.linear(h, weights.hidden, weights.hidden_bias)
    hidden_reset, hidden_update, hidden_new = torch.unsafe_chunk(from_hidden, 3, -1)
    reset = (input_reset + hidden_reset).sigmoid()
    update = (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    return ((h - new) * update + new,)


def _tanh_cell(from_input: Tensor, state: State, weights: _Weights) -> State:
    return ((from_input + F.linear(state[0], weights.hidden, weights.hidden_bias)).tanh(),)


def _relu_cell(from_input: Tensor, state: State, weights: _Weights) -> State:
    return ((from_input + F.linear(state[0], weights.hidden, weights.hidden_bias)).relu(),)


# ---- one layer in one direction -------------------------------------------------------------------------------------


def _run_direction(
    cell: Cell, steps: Sequence[Tensor], state: State, weights: _Weights, reverse: bool
) -> tuple[list[Tensor], State]:
    """Return the outputs of all steps, in the order of the steps, and the last state."""
    outputs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        state = cell(step, state, weights)
        outputs.append(state[0])
    return outputs[::-1] if reverse else outputs, state


def _run_packed_forward(
    cell: Cell, steps: Sequence[Tensor], state: State, weights: _Weights
) -> tuple[list[Tensor], State]:
    """Run packed sequences, longest first: the batch shrinks as sequences end, and their last states are set aside."""
    outputs: list[Tensor] = []
    ended: list[State] = []
    for step in steps:
        rows = step.shape[0]
        if rows < state[0].shape[0]:
            ended.append(tuple(part[rows:] for part in state))
            state = tuple(part[:rows] for part in state)
        state = cell(step, state, weights)
        outputs.append(state[0])
    parts = [state, *reversed(ended)]
    return outputs, tuple(torch.cat(rows) for rows in zip(*parts, strict=True)) if ended else state


def _run_packed_backward(
    cell: Cell, steps: Sequence[Tensor], first: State, weights: _Weights
) -> tuple[list[Tensor], State]:
    """Run packed sequences from the last step to the first: the batch grows as sequences begin, each with its state."""
    outputs: list[Tensor] = []
    state = tuple(part[: steps[-1].shape[0]] for part in first)
    for step in reversed(steps):
        begun, rows = state[0].shape[0], step.shape[0]
        if begun < rows:
            state = tuple(torch.cat([now, part[begun:rows]]) for now, part in zip(state, first, strict=True))
        state = cell(step, state, weights)
        outputs.append(state[0])
    return outputs[::-1], state


# ---- all layers -----------------------------------------------------------------------------------------------------


def _run_layers(
    cell: Cell, data: Tensor, batch_sizes: list[int] | None, first: State, params: Sequence[Tensor], options: _Options
) -> tuple[Tensor, State]:
    """Return the output of the last layer, and the last states of all layers and directions.

    `data` is (step, sequence, feature), or (row, feature) for packed sequences with these batch sizes.
    """
    directions = 2 if options.bidirectional else 1
    states = list(zip(*(part.unbind(0) for part in first), strict=True))
    weights = list(_layers(params, options.has_biases, len(states)))
    last: list[State] = []
    for layer in range(options.num_layers):
        outputs: list[Tensor] = []
        for direction in range(directions):
            number, reverse = layer * directions + direction, direction == 1
            its = weights[number]
            from_input = F.linear(data, its.input, its.input_bias)
            if batch_sizes is None:
                made, state = _run_direction(cell, from_input.unbind(0), states[number], its, reverse)
            else:
                run = _run_packed_backward if reverse else _run_packed_forward
                made, state = run(cell, from_input.split(batch_sizes), states[number], its)
            outputs.append(torch.stack(made) if batch_sizes is None else torch.cat(made))
            last.append(state)
        data = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if options.dropout and options.train and layer < options.num_layers - 1:
            data = F.dropout(data, options.dropout)
    return data, tuple(torch.stack(parts) for parts in zip(*last, strict=True))


def _layers(params: Sequence[Tensor], has_biases: bool, count: int) -> Iterator[_Weights]:
    """Yield the parameters of each layer and direction: two weights, and the biases and the projection that it has."""
    each = len(params) // count
    biases = 2 if has_biases else 0
    for start in range(0, len(params), each):
        its = params[start : start + each]
        bias, hidden_bias = (its[2], its[3]) if has_biases else (None, None)
        yield _Weights(its[0], its[1], bias, hidden_bias, its[2 + biases] if each > 2 + biases else None)


# ---- above autograd -------------------------------------------------------------------------------------------------


def _override(cell: Cell) -> Override:
    """Return the override of a cell's function: its overload `input` takes padded sequences, `data` packed ones."""

    def override(func: OpOverload) -> Callable[..., object]:
        run = _run_padded if overload_name(func) == "input" else _run_packed

        def kernel(keys: Keys, *args: object, **kwargs: object) -> object:
            named = resolve(func).arguments(args, kwargs)
            if not any(isinstance(value, DTensorBase) for value in pytree.tree_leaves(named)):
                return call_original(func, keys, *args, **kwargs)
            output, state = run(cell, **named)
            return output, *state

        return kernel

    return override


def _run_padded(
    cell: Cell, input: Tensor, hx: Tensor | State, params: Sequence[Tensor], **options: Any
) -> tuple[Tensor, State]:
    chosen = _Options(**options)
    steps = input.transpose(0, 1) if chosen.batch_first else input
    output, state = _run_layers(cell, steps, None, _as_state(hx), params, chosen)
    return output.transpose(0, 1) if chosen.batch_first else output, state


def _run_packed(
    cell: Cell, data: Tensor, batch_sizes: Tensor, hx: Tensor | State, params: Sequence[Tensor], **options: Any
) -> tuple[Tensor, State]:
    return _run_layers(cell, data, batch_sizes.tolist(), _as_state(hx), params, _Options(**options))


def _as_state(hx: Tensor | State) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


define("aten::lstm", override=_override(_lstm_cell))
define("aten::gru", override=_override(_gru_cell))
define("aten::rnn_tanh", override=_override(_tanh_cell))
define("aten::rnn_relu", override=_override(_relu_cell))
