"""Sharding rules in PyTorch's form: a function that lists the placements an op accepts on one mesh axis.

>>> def softmax(x, dim, half_to_float):
...     return [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim]

Each row holds the placements of the outputs and those of the inputs. The rows of a call are translated into one line of
the rule notation: a row with sharded inputs defines a factor, a row with Partial inputs an entry of `linear` or
`monotone`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .._torch.ops import schema_of
from ..notation import RuleError
from ..ops.call import Call, is_list
from ..ops.schema import tensor_arguments
from ..sharding.placement import AnyShard, Partial, Placement

Row = tuple[Sequence[Placement | None], Sequence[Placement | None]]
RowsFunction = Callable[..., Sequence[Row]]


class HasMeta(Protocol):
    """Anything with the shape and dtype of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor, without data, with which the user's function is called."""

    shape: Sequence[int]
    dtype: torch.dtype
    ndim: int


def rule_from_rows(rows_of: RowsFunction, call: Call) -> str:
    """Return the rule of a call as one line, from the rows that the user's function returns for it.

    A row that no rule can express is left out: a sharded input with a replicated result, or sharded and Partial inputs
    together. Inputs with such placements are redistributed to those of another row.
    """
    given = [argument for argument in schema_of(call.op).arguments if argument.name in call.arguments]
    tensors = [argument.name for argument in tensor_arguments(call.op) if not argument.out]
    values = {a.name: _info(call.arg(a.name)) if a.name in tensors else call.arg(a.name) for a in given}
    positional = [values[a.name] for a in given if not a.kwarg_only]
    rows = rows_of(*positional, **{a.name: values[a.name] for a in given if a.kwarg_only})
    inputs, outputs = _Inputs(tensors, call), _Outputs(len(schema_of(call.op).returns))
    for number, (row_outputs, row_inputs) in enumerate(rows):
        _check_length(call, row_outputs, row_inputs, len(outputs.dims), len(given))
        by_name = dict(zip((a.name for a in given), row_inputs, strict=True))
        placements = [by_name[name] for name in inputs.names]
        if any(isinstance(placement, AnyShard) for placement in placements):
            _add_factor(f"f{number}", placements, row_outputs, inputs, outputs)
        else:
            inputs.add_partial(placements, row_outputs)
    return " ; ".join([f"{inputs.text()} -> {outputs.text()}", *inputs.clauses(), outputs.clause()])


def _info(value: HasMeta | Sequence[HasMeta] | None) -> TensorInfo | list[TensorInfo | None] | None:
    if value is None:
        return None
    if is_list(value):
        return [None if element is None else _tensor_info(element) for element in value]  # type: ignore[union-attr]
    return _tensor_info(value)  # type: ignore[arg-type]


def _tensor_info(value: HasMeta) -> TensorInfo:
    return TensorInfo(value.shape, value.dtype, len(value.shape))


def _check_length(
    call: Call,
    row_outputs: Sequence[Placement | None],
    row_inputs: Sequence[Placement | None],
    outputs: int,
    inputs: int,
) -> None:
    if (len(row_outputs), len(row_inputs)) != (outputs, inputs):
        raise RuleError(
            f"a sharding of {call.op} has {len(row_outputs)} output and {len(row_inputs)} input placements",
            f"give {outputs} and {inputs}: one for each result and each argument of this call, "
            "None for those that are not tensors",
        )


class _Inputs:
    """The operands of the rule under construction: the factor of each dim, and which may be Partial together."""

    def __init__(self, operands: list[str], call: Call) -> None:
        self.operands = operands
        self.names = [name for name in operands if call.arg(name, None) is not None]
        """The operands that this call passes."""
        self.dims: dict[str, list[str] | None] = {}
        """The factor of each dim, "_" for none; None for a list of tensors."""
        for name in self.names:
            value = call.arg(name)
            self.dims[name] = None if is_list(value) else ["_"] * len(value.shape)
        self.partial: dict[str, list[str]] = {"linear": [], "monotone": []}

    def add_partial(self, given: Sequence[Placement | None], results: Sequence[Placement | None]) -> None:
        """Add a row without sharded inputs: the operands that are Partial in it may be so together."""
        partial = [placement for placement in given if isinstance(placement, Partial)]
        ops = {placement.reduce_op for placement in (*partial, *results) if isinstance(placement, Partial)}
        if not partial or len(ops) != 1 or not all(isinstance(result, Partial) for result in results):
            return
        clause = "linear" if ops <= {"sum", "avg"} else "monotone"
        positions = [self.operands.index(n) for n, p in zip(self.names, given, strict=True) if isinstance(p, Partial)]
        members = "+".join(map(str, positions))
        if members not in self.partial[clause]:
            self.partial[clause].append(members)

    def text(self) -> str:
        """Return the left side of the rule."""
        dims = [self.dims.get(name, []) for name in self.operands]
        return ", ".join("{_..}" if factors is None else " ".join(factors) for factors in dims)

    def clauses(self) -> list[str]:
        """Return the clauses about Partial operands."""
        return [f"{clause} {' | '.join(members)}" for clause, members in self.partial.items() if members]


class _Outputs:
    """The results of the rule under construction: the factors of their dims, and the reduction of each."""

    def __init__(self, count: int) -> None:
        self.dims: list[dict[int, str]] = [{} for _ in range(count)]
        self.reduce = [""] * count

    def fits(self, results: Sequence[Placement | None]) -> bool:
        """Return whether each result is sharded in a dim that has no factor yet, or Partial with its reduction."""
        return all(
            result.dim not in self.dims[i]
            if isinstance(result, AnyShard)
            else isinstance(result, Partial) and self.reduce[i] in ("", result.reduce_op)
            for i, result in enumerate(results)
        )

    def text(self) -> str:
        """Return the right side of the rule."""
        return ", ".join(
            " ".join([dims.get(dim, "_") for dim in range(max(dims, default=-1) + 1)] + ["_.."]) for dims in self.dims
        )

    def clause(self) -> str:
        """Return the clause about reductions."""
        return f"reduce {', '.join(op or 'sum' for op in self.reduce)}"


def _add_factor(
    factor: str,
    given: Sequence[Placement | None],
    results: Sequence[Placement | None],
    inputs: _Inputs,
    outputs: _Outputs,
) -> None:
    """Add a row with sharded inputs as a factor, unless a dim already has a factor or no rule can express the row."""
    sharded = [(inputs.dims[n], p.dim) for n, p in zip(inputs.names, given, strict=True) if isinstance(p, AnyShard)]
    if any(isinstance(p, Partial) for p in given) or not outputs.fits(results):
        return
    free = [(dims, dim) for dims, dim in sharded if dims is not None and dims[dim] == "_"]
    if len(free) < len(sharded):
        return
    for dims, dim in free:
        dims[dim] = factor
    for i, result in enumerate(results):
        if isinstance(result, AnyShard):
            outputs.dims[i][result.dim] = factor
        elif isinstance(result, Partial):
            outputs.reduce[i] = result.reduce_op
