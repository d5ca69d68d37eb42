"""One call of an op as its rule sees it: shapes, dtypes and arguments, no data.

>>> x = torch.empty(4, 6)
>>> call = Call.make(torch.ops.aten.sum.dim_IntList, (x, [1]), {})
>>> call.shape(0), call.arg("dim"), call.arg("keepdim")
((4, 6), [1], False)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._torch.ops import OpOverload, schema_of
from ..notation.patterns import RuleError
from .schema import Operands, operands_of

Args = tuple[Any, ...]
"""Arguments of a call that are passed by position."""
Kwargs = dict[str, Any]
"""Arguments of a call by name."""

_REQUIRED = object()


@dataclass(frozen=True)
class Call:
    """One call of an op. Tensors are known by `shape` and `dtype` alone.

    >>> call = Call.make(torch.ops.aten.sum.dim_IntList, (torch.empty(4, 6), [1]), {})
    >>> call.shape(0), call.arg("dim"), call.arg("keepdim")
    ((4, 6), [1], False)
    """

    op: OpOverload
    arguments: Kwargs = field(hash=False)
    tensors: Args
    """The operands in the order of the rule's inputs: lists for lists, None for what is missing or a number."""

    @classmethod
    def make(
        cls, op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], operands: Operands | None = None
    ) -> Call:
        """Return the call of `op` with these arguments: tensors, or anything with their shape and dtype.

        `operands` are the positions of the rule's operands in the schema, where the rule was written for another op.
        """
        schema = schema_of(op).arguments
        arguments = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
        positions = operands if operands is not None else tuple(a.position for a in operands_of(op))
        tensors = tuple(None if p is None else arguments.get(schema[p].name) for p in positions)
        return cls(op, arguments, tensors)

    def arg(self, name: str, default: object = _REQUIRED) -> Any:
        """Return an argument by its name in the schema: as passed, else the schema's default, else `default`."""
        if name in self.arguments:
            return self.arguments[name]
        for argument in schema_of(self.op).arguments:
            if argument.name == name and argument.has_default_value():
                return argument.default_value
        if default is _REQUIRED:
            raise RuleError(f"{self.op} has no argument {name!r} in this call", f"its schema is {schema_of(self.op)}")
        return default

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the shape of an operand."""
        tensor = self.tensors[position]
        if tensor is None or is_list(tensor):
            raise RuleError(
                f"operand {position} of {self.op} is {'a list' if is_list(tensor) else 'no tensor'} in this call",
                f"look at call.tensors[{position}] before call.shape({position})",
            )
        return tuple(tensor.shape)

    def ndim(self, position: int) -> int:
        """Return the number of dims of an operand."""
        return len(self.shape(position))

    def element(self, index: int) -> Call:
        """Return the call that a foreach op makes for one element of its lists."""

        def pick(value: Any) -> object:
            if not is_list(value):
                return value
            return value[index] if len(value) else None  # a list that is not in use: maxima of no AMSGrad

        arguments = {name: pick(value) for name, value in self.arguments.items()}
        return replace(self, arguments=arguments, tensors=tuple(map(pick, self.tensors)))


def is_list(value: object) -> bool:
    """Return whether an argument is a list of tensors or numbers; a `TensorMeta`, though a tuple, is not."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "shape")


def is_ordinary(number: complex) -> bool:
    """Return whether a number is neither zero nor infinite nor NaN.

    Rules may depend on these, so they have separate plans.
    """
    return number - number == 0 and number != 0


def numbers_of(call: Call) -> list[complex]:
    """Return the numbers among the arguments, without those in lists."""
    return [value for value in call.arguments.values() if isinstance(value, (int, float, complex))]


def has_finite_numbers(call: Call) -> bool:
    """Return whether a sum may pass a product with the numbers of a call.

    Inf * 5 + inf * -2 is NaN, inf * (5 - 2) is not.
    """
    return all(is_ordinary(number) or number == 0 for number in numbers_of(call))
