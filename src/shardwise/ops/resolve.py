"""An overload together with the record of its op, as dispatch uses it.

>>> found = resolve(torch.ops.aten.mul_.Scalar)
>>> found.key, found.variant, found.writes
('aten::mul', 'inplace', (0,))
>>> x = torch.empty(4, 6)
>>> found.rule(Call.make(torch.ops.aten.mul_.Scalar, (x, 2.0), {}, found.operands))
Rule('b?.. -> b.. ; linear 0')
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .._torch.ops import OpOverload, schema_of
from ..notation import Rule, parse, without_operands
from ..notation.patterns import RuleError
from ..sharding.cache import ENTRY_BYTES, Cache
from ..sharding.layout import Layout
from .call import Args, Call, Kwargs
from .kernel import Kernel
from .op import Function, Op, Put
from .schema import Operands, operands_of, overload_key, returns_view, tensor_arguments, variant_of

NEEDS_DATA = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))
"""Tags of ops whose results have shapes, or Python values, that depend on data."""


class ResolvedOp:
    """One overload: its schema, its op's record, and facts that are derived once.

    `op` is the record with the rule, which may be that of the op whose variant this overload is. `own` is the record of
    this overload, or of all overloads of its op. `operands` holds, for each input of the rule, the position of its
    argument in the schema, or None where a number takes its place. `built_in` is what the overload resolves to without
    the user's rule; None if the user gave none.

    >>> found = resolve(torch.ops.aten.mul_.Scalar)
    >>> found.key, found.variant, found.writes
    ('aten::mul', 'inplace', (0,))
    """

    def __init__(
        self,
        func: OpOverload,
        op: Op,
        operands: Operands | None = None,
        own: Op | None = None,
        built_in: ResolvedOp | None = None,
    ) -> None:
        self.func, self.op, self.built_in = func, op, built_in
        schema = schema_of(func)
        self.name: str = schema.name
        self.variant = variant_of(func)
        self.writes = tuple(argument.position for argument in tensor_arguments(func) if argument.write)
        self.is_view = returns_view(func)
        self.returns = bool(schema.returns)
        self.names: tuple[str, ...] = tuple(argument.name for argument in schema.arguments)
        given = operands if operands is not None else tuple(a.position for a in operands_of(func))
        self.operands = tuple(p for p in given if p is None or op.gradient_of != self.names[p])
        self.defaults: Kwargs = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.needs_data = bool(NEEDS_DATA & set(func.tags))
        self.number_arguments = _arguments_of_type(func, "number", "float")
        """Rules do not read the values of these by default."""
        self.size_arguments = _arguments_of_type(func, "int")
        # Variants do not inherit these, nor does an `out=` overload from the record of all overloads.
        itself = own if own is not None and (self.variant != "out" or own.name == overload_key(func)) else None
        self.decomposition: Function | None = itself.decomposition if itself is not None else None
        self.python: Function | None = itself.python if itself is not None else None
        self.put: Put | None = itself.put if itself is not None else None
        # Filled in by dispatch on first use.
        self.bindings: Cache[Hashable, Function] = Cache(1 << 16, _entry_bytes)
        self.result_forms: Cache[Hashable, Any] = Cache(1 << 16, _entry_bytes)
        self.accepted: Cache[Hashable, bool] = Cache(1 << 16, _entry_bytes)
        self.warned = False
        self.in_place_view: OpOverload | None = None

    @property
    def key(self) -> str:
        """The name of the record."""
        return self.op.name

    @property
    def has_rule(self) -> bool:
        """Whether there is a rule; it may still refuse a call."""
        return self.op.rule is not None

    def at(self, call: Call) -> ResolvedOp:
        """Return what serves this call: the built-in op if its rule for the call is the user's rule, else this.

        So registering a built-in rule verbatim changes nothing: the op's kernels and local code still serve it.
        """
        if self.built_in is None or not self.built_in.has_rule:
            return self
        return self.built_in if self.built_in.rule(call) is self._unchecked_rule(call) else self

    def rule(self, call: Call) -> Rule | None:
        """Return the rule of one call. None to decompose it, or to run it on gathered inputs."""
        rule = self._unchecked_rule(call)
        for name in rule.kernel if rule is not None else ():
            self.kernel(name)
        return rule

    def _unchecked_rule(self, call: Call) -> Rule | None:
        """Return the rule of one call, which may name kernels that this op lacks."""
        source = self.op.rule
        found = source(call) if callable(source) and not isinstance(source, Rule) else source
        if found is None:
            return None
        rule = parse(found) if isinstance(found, str) else found
        dropped = frozenset(i for i, position in enumerate(self.operands) if position is None)
        if dropped and len(rule.inputs) == len(self.operands):
            rule = without_operands(rule, dropped)
        if not rule.fits(len(self.operands) - len(dropped)):
            raise RuleError(
                f"the rule {rule!s} of {self.key} has {len(rule.inputs)} operands",
                f"{call.op} has {len(self.operands) - len(dropped)}; write that many patterns left of the arrow, for "
                f"{schema_of(call.op)}",
            )
        return rule

    def layout_rule(self, call: Call, layouts: Sequence[Layout]) -> Rule | None:
        """Return the rule of one call whose operands have these layouts; None where the layouts do not matter."""
        find = self.op.layout_rule
        found = None if find is None or self.variant != "functional" else find(call, layouts)
        return None if found is None else parse(found)

    def kernel(self, name: str) -> Kernel:
        """Return the kernel for this factor; `RuleError` if there is none."""
        found = kernel_for(self.op, name)
        if found is None:
            raise RuleError(
                f"{self.key} has no kernel for the factor {name}", f"register it with kernels={{{name!r}: ...}}"
            )
        return found

    def tensors(self, call: Call) -> Args:
        """Return the operands of a call, one for each input of its rule."""
        return tuple(t for t, position in zip(call.tensors, self.operands, strict=True) if position is not None)

    def arguments(self, args: Iterable[object], kwargs: Mapping[str, object]) -> Kwargs:
        """Return all arguments of a call by name, defaults included."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def __repr__(self) -> str:
        return f"ResolvedOp({self.func}, {self.op!r})"


def _entry_bytes(key: object, value: object) -> int:
    return ENTRY_BYTES


def kernel_for(op: Op, factor: str) -> Kernel | None:
    """Return the kernel of an op for this factor.

    That of `k` also serves k0, k1, ... and their refinements k0_0, k0_1, ...
    """
    return op.kernels.get(factor) or op.kernels.get(_NUMBER.sub("", factor))


_NUMBER = re.compile(r"\d+(_\d+)?$")


def _arguments_of_type(func: OpOverload, *types: str) -> frozenset[int | str]:
    """Return the arguments, by position and by name, whose types have one of these words: "number", "float", "int"."""
    found: set[int | str] = set()
    for position, argument in enumerate(schema_of(func).arguments):
        if any(word in str(argument.type) for word in types):
            found |= {position, argument.name}
    return frozenset(found)
