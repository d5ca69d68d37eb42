"""Which op has which rule.

A rule is registered for one overload (`aten::add.Tensor`) or for all of an op (`aten::add`). In-place, `out=`,
scalar, dtype and foreach variants follow from the schema. A rule that depends on the call is a function that is
given the `Call` and returns the text.

>>> table = Registry()
>>> table.register_table({"aten::mul": "b?.., b?.. -> b.. ; linear 0 | 1"})
>>> found = table.rule_for(torch.ops.aten.mul_.Scalar)
>>> found.variant, found.writes
('inplace', (0,))
>>> x = torch.empty(4, 6)
>>> found.rule(Call.make(torch.ops.aten.mul_.Scalar, (x, 2.0), {}, found))
Rule('b?.. -> b.. ; linear 0')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from .notation import RuleError
from .rule import Rule, parse, without_operands
from .schema import (
    Operands,
    family,
    match_operands,
    operands_of,
    overload_key,
    overloads,
    tensor_arguments,
    variant_of,
)

Kernel = Any  # what it looks like is the business of those who run it
Op = OpOverload | OpOverloadPacket | str
_REQUIRED = object()


@dataclass(frozen=True)
class Call:
    """One call of an op as a rule sees it. Tensors are known by `shape` and `dtype` alone."""

    op: OpOverload
    arguments: Mapping[str, Any] = field(hash=False)
    tensors: tuple[Any, ...]
    """The operands in the order of the rule's inputs: lists for lists, None for what is missing or a number."""

    @classmethod
    def make(
        cls, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], registered: Registered | None = None
    ) -> Call:
        """The call of `op` with these arguments: tensors, or anything with their shape and dtype."""
        schema = op._schema.arguments
        arguments = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
        positions = registered.operands if registered else tuple(a.position for a in operands_of(op))
        tensors = tuple(None if p is None else arguments.get(schema[p].name) for p in positions)
        return cls(op, arguments, tensors)

    def arg(self, name: str, default: Any = _REQUIRED) -> Any:
        """An argument by its name in the schema: as passed, else the schema's default, else `default`."""
        if name in self.arguments:
            return self.arguments[name]
        for argument in self.op._schema.arguments:
            if argument.name == name and argument.has_default_value():
                return argument.default_value
        if default is _REQUIRED:
            raise RuleError(f"{self.op} has no argument {name!r} in this call", f"its schema is {self.op._schema}")
        return default

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an operand."""
        tensor = self.tensors[position]
        if tensor is None or _is_list(tensor):
            raise RuleError(f"operand {position} of {self.op} is no tensor in this call", "look at call.tensors first")
        return tuple(tensor.shape)

    def ndim(self, position: int) -> int:
        """The number of dims of an operand."""
        return len(self.shape(position))

    def element(self, index: int) -> Call:
        """The call that a foreach op makes for one element of its lists."""

        def pick(value: Any) -> Any:
            if not _is_list(value):
                return value
            return value[index] if len(value) else None  # a list that is not in use: maxima of no AMSGrad

        arguments = {name: pick(value) for name, value in self.arguments.items()}
        return replace(self, arguments=arguments, tensors=tuple(map(pick, self.tensors)))


def _is_list(value: Any) -> bool:
    # A TensorMeta is a tuple, too.
    return isinstance(value, (list, tuple)) and not hasattr(value, "shape")


Source = str | Rule | Callable[[Call], str | Rule | None]
"""A rule, or a function that tells the rule of a call: None where the call is to run whole, by its nature."""

READS_SCALARS: set[str] = {"aten::constant_pad_nd"}
"""Ops whose rules look at the value of a number, such as the p of a norm: each value has a plan of its own."""

KEEPS_SIZES: set[str] = set()
"""Ops whose results have the sizes of their operands' dims, though a kernel or a size argument is in their rules."""

COPES_WITH_EMPTY: set[str] = set()
"""Rules of ops that may be called on empty parts: those whose results there cannot be told from their metadata."""

UNREAD: set[str] = {f"aten::{name}" for name in ("ones_like", "empty_like", "full_like", "rand_like", "randn_like")}
UNREAD |= {f"aten::new_{name}" for name in ("zeros", "ones", "empty", "full")}
"""Rules of ops that look at an operand's shape alone: a Partial one need not be reduced for them."""

INSTEAD: dict[str, Callable[..., Any]] = {}
"""Ops that are expressed by others, which have rules: a function of the op's arguments, by the name of the overload."""


@dataclass(frozen=True)
class Registered:
    """The rule of an op, and how that op is a variant of the one it was written for."""

    key: str
    source: Source
    kernels: Mapping[str, Kernel] = field(hash=False)
    variant: str
    """`functional`, `inplace`, `out`, or `foreach`: the rule is that of one element of the lists."""
    operands: Operands
    """For each input of the rule the position of its argument in the schema; None where a number stands for it."""
    writes: tuple[int, ...]
    """The positions of the arguments that are written; of an `out` variant they are the outputs, in order."""

    def rule(self, call: Call) -> Rule | None:
        """The rule of one call; None where it is to run whole."""
        source = self.source(call) if callable(self.source) else self.source
        if source is None:
            return None
        rule = parse(source) if isinstance(source, str) else source
        dropped = frozenset(i for i, position in enumerate(self.operands) if position is None)
        if dropped and len(rule.inputs) == len(self.operands):
            rule = without_operands(rule, dropped)
        if not rule.fits(len(self.operands) - len(dropped)):
            raise RuleError(
                f"the rule {rule!s} of {self.key} has {len(rule.inputs)} operands",
                f"{call.op} has {len(self.operands) - len(dropped)}: {call.op._schema}",
            )
        for name in rule.kernel:
            self.kernel(name)
        return rule

    def kernel(self, name: str) -> Kernel:
        """The kernel that cuts this factor. That of `k` serves k0, k1, ... too, and their parts k0_0, k0_1, ..."""
        found = self.kernels.get(name) or self.kernels.get(re.sub(r"\d+(_\d+)?$", "", name))
        if found is None:
            raise RuleError(
                f"{self.key} has no kernel for the factor {name}", f"register it with kernels={{{name!r}: ...}}"
            )
        return found

    def tensors(self, call: Call) -> tuple[Any, ...]:
        """The operands of a call that the inputs of its rule stand for."""
        return tuple(t for t, position in zip(call.tensors, self.operands, strict=True) if position is not None)


@dataclass(frozen=True)
class _Entry:
    source: Source
    kernels: Mapping[str, Kernel]


class Registry:
    """A table of rules by op."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._overloads: dict[str, list[str]] = {}
        self._found: dict[OpOverload, Registered | None] = {}
        self._generics: list[Callable[[OpOverload], Source | None]] = []
        self._behind: Callable[[], Registry] | None = None

    def register(self, op: Op, rule: Source, kernels: Mapping[str, Kernel] | None = None) -> None:
        """Give an op its rule; text is parsed here, so that a wrong one is refused at once."""
        key = _key(op)
        source = parse(rule) if isinstance(rule, str) else rule
        entry = _Entry(source, dict(kernels or {}))
        if isinstance(source, Rule) and set(source.kernel) != set(entry.kernels):
            raise RuleError(
                f"{key} has kernels for {sorted(entry.kernels) or 'nothing'}, its rule is {source!s}",
                "pass one for each factor that the kernel clause names",
            )
        packet, _, overload = key.partition(".")
        if overload and key not in self._entries:
            self._overloads.setdefault(packet, []).append(key)
        self._entries[key] = entry
        self._found.clear()

    def register_table(self, rules: Mapping[str, Source]) -> None:
        """Register a table of rules without kernels."""
        for op, rule in rules.items():
            self.register(op, rule)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def rule_for(self, func: OpOverload) -> Registered | None:
        """The rule of an overload: its own, else its op's, else that of the op it is a variant of."""
        if func not in self._found:
            self._found[func] = next(self._resolve(func), None) or self._generic(func) or self._of_table_behind(func)
        return self._found[func]

    def put_behind(self, table: Callable[[], Registry]) -> None:
        """Ask another table, made when it is first needed, for ops that have no rule in this one."""
        self._behind = table
        self._found.clear()

    def _of_table_behind(self, func: OpOverload) -> Registered | None:
        return None if self._behind is None else self._behind().rule_for(func)

    def add_generic(self, find: Callable[[OpOverload], Source | None]) -> None:
        """Ask this function for ops that have no rule of their own, after those added before it."""
        self._generics.append(find)
        self._found.clear()

    def _generic(self, func: OpOverload) -> Registered | None:
        for find in self._generics:
            source = find(func)
            if source is not None:
                operands = tuple(argument.position for argument in operands_of(func))
                writes = tuple(argument.position for argument in tensor_arguments(func) if argument.write)
                parsed = parse(source) if isinstance(source, str) else source
                return Registered(overload_key(func), parsed, {}, variant_of(func), operands, writes)
        return None

    def _resolve(self, func: OpOverload) -> Iterator[Registered]:
        own = overload_key(func)
        for name in family(func):
            same = f"{name}.{func._overloadname}"
            if same in self._entries:
                models = [func] if same == own else [m for m in overloads(name) if overload_key(m) == same]
                yield from self._derive(func, same, models)
            if name in self._entries:
                yield from self._derive(func, name, overloads(name))
            for key in self._overloads.get(name, ()):
                yield from self._derive(func, key, [m for m in overloads(name) if overload_key(m) == key])

    def _derive(self, func: OpOverload, key: str, models: Iterable[OpOverload]) -> Iterator[Registered]:
        """The rule under this key for `func`, by the model whose operands it matches best, if there is one."""
        entry = self._entries[key]
        source = entry.source
        best: Operands | None = None
        models = list(models)
        if isinstance(source, Rule) and models and not any(source.fits(len(operands_of(m))) for m in models):
            raise RuleError(
                f"the rule {source!s} of {key} has {len(source.inputs)} operands", f"see {models[0]._schema}"
            )
        for model in models:
            # An overload that the rule was registered for needs no match: its operands are what the rule speaks of.
            itself = model is func
            operands = tuple(a.position for a in operands_of(func)) if itself else match_operands(func, model)
            fits = operands is not None and (not isinstance(source, Rule) or source.fits(len(operands)))
            # A function of the call sees the most if it was written for the overload with the most tensors.
            if operands is not None and fits and (best is None or len(operands) > len(best)):
                best = operands
        if best is not None:
            writes = tuple(argument.position for argument in tensor_arguments(func) if argument.write)
            yield Registered(key, source, entry.kernels, variant_of(func), best, writes)


def _key(op: Op) -> str:
    if isinstance(op, OpOverload):
        return overload_key(op)
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name
    if "::" not in op:
        raise RuleError(f"no op is called {op!r}", "name it with its namespace, as in aten::add or aten::add.Tensor")
    return op


registry = Registry()
register = registry.register
register_table = registry.register_table
rule_for = registry.rule_for
