"""The registry: one record per op, and the record of any overload.

A family of ops defines its records when it is imported, each with everything that is known about the op:

>>> define = definitions_in(__name__)
>>> define("aten::mm", "m k, k n -> m n ; linear 0 | 1")
>>> define("aten::cumsum", rule_of_call, kernels={"k": Kernel(scan)})

A user's rule (`register`) goes on top of the built-in record and does not replace it. `resolve` finds the record of an
overload: its own, else its op's, else that of the op it is a variant of (in-place, `out=`, scalar, foreach). Records
are never merged. Decomposition, Python code and view inverse come from the overload's own record, or from its op's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, Unpack

import torch

from .._torch.ops import OpOverload, OpOverloadPacket, overload_name, packet_name, schema_of
from ..notation.patterns import RuleError
from ..notation.rule import Rule, parse
from ..sharding.runtime import clear_all_caches
from .kernel import Kernel
from .op import FACTS_OF_ANY_RULE, Facts, Op, Source
from .resolve import ResolvedOp, kernel_for
from .schema import (
    Operands,
    family,
    match_operands,
    operands_of,
    overload_key,
    overloads,
    variant_of,
)

OpName = OpOverload | OpOverloadPacket | str


class Define(Protocol):
    """`define(names, rule, kernels=..., local=..., ...)` adds one record for each name, with the same fields."""

    def __call__(self, names: str | Iterable[str], rule: Source | None = None, **facts: Unpack[Facts]) -> None: ...


class Registry:
    """Records by op name: built-in ones and, on top of them, the user's.

    A second registry may serve the ops that have neither (`put_behind`).

    >>> with registry.restored():
    ...     registry.register("aten::mm", "m k, k n -> m n")
    ...     rule_for(torch.ops.aten.mm.default).op
    Op('aten::mm', 'm k, k n -> m n')
    """

    def __init__(self) -> None:
        self._built_in: dict[str, Op] = {}
        self._user: dict[str, Op] = {}
        self._resolved: dict[OpOverload, ResolvedOp] = {}
        self._patterns: list[Callable[[OpOverload], Op | None]] = []
        self._behind: Callable[[], Registry] | None = None

    # ---- definitions ------------------------------------------------------------------------------------------

    def define(self, op: Op) -> None:
        """Add a built-in record. Rules are parsed when they are first used, so that importing takes no time."""
        before = self._built_in.get(op.name)
        if before is not None:
            raise RuleError(
                f"{op.name} is defined in {before.file} and in {op.file}",
                "define an op once, with all its fields",
            )
        self._built_in[op.name] = op
        self._changed()

    def register(self, op: OpName, rule: Source, kernels: Mapping[str, Kernel] | None = None) -> None:
        """Give an op the user's rule; text is parsed here, so that an error in it is raised here.

        >>> register("mylib::scale_rows", "m n, m -> m n ; linear 0 | 1")
        """
        name = name_of(op)
        source = parse(rule) if isinstance(rule, str) else rule
        given = dict(kernels or {})
        if isinstance(source, Rule) and set(source.kernel) != set(given):
            inherited = self._kernels_for(name, source)
            if given or set(source.kernel) != set(inherited):
                raise RuleError(
                    f"{name} has kernels for {sorted(given) or 'nothing'}, but its rule is {source!s}",
                    f"pass one kernel for each of {sorted(source.kernel)}: kernels={{factor: Kernel(...)}}"
                    if source.kernel
                    else "leave kernels out, or name their factors in a clause: kernel k",
                )
            given = inherited
        built_in = self._built_in_for(name) or Op(name)
        facts = {fact: getattr(built_in, fact) for fact in FACTS_OF_ANY_RULE}
        if kernels:
            facts["draw"] = None  # the user's kernels draw
        if rule == built_in.rule:
            facts["list_kernel"] = built_in.list_kernel
        elif callable(rule) and not isinstance(rule, Rule):
            facts["reads_numbers"] = True  # the user's function may look at anything
        self._user[name] = Op(name, source, given, origin="user", file="a call of register", **facts)
        self._changed()

    def _kernels_for(self, name: str, rule: Rule) -> dict[str, Kernel]:
        """Return the built-in kernels of an op, or of the op of this overload, for the factors of a rule."""
        op = self._built_in_for(name)
        kernels = {} if op is None else {factor: kernel_for(op, factor) for factor in rule.kernel}
        return {factor: kernel for factor, kernel in kernels.items() if kernel is not None}

    def _built_in_for(self, name: str) -> Op | None:
        """Return the built-in record of an op, or of that which this overload belongs to, or is a variant of."""
        packet, _, overload = name.partition(".")
        own = self._built_in.get(name) or self._built_in.get(packet)
        if own is not None:
            return own
        funcs = (func for func in overloads(packet) if overload in ("", overload_name(func)))
        return next((op for func in funcs for op, _ in self._candidates(func, self._built_in)), None)

    def register_table(self, rules: Mapping[str, Source]) -> None:
        """Register a table of rules without kernels."""
        for op, rule in rules.items():
            self.register(op, rule)

    def add_pattern(self, find: Callable[[OpOverload], Op | None]) -> None:
        """Ask this function for the record of ops that have none, after the functions added before it."""
        self._patterns.append(find)
        self._changed()

    def put_behind(self, table: Callable[[], Registry]) -> None:
        """Look up ops without a record in another table, created on first use."""
        self._behind = table
        self._changed()

    @contextmanager
    def restored(self) -> Iterator[Registry]:
        """Restore the records on exit, so that they may be changed inside. For tests and experiments."""
        before = dict(self._built_in), dict(self._user)
        try:
            yield self
        finally:
            self._built_in, self._user = before
            self._changed()

    def _changed(self) -> None:
        self._resolved.clear()
        clear_all_caches()

    def __iter__(self) -> Iterator[str]:
        return iter({**self._built_in, **self._user})

    def __getitem__(self, name: str) -> Op:
        return self._user.get(name) or self._built_in[name]

    def overloads_with(self, fact: Callable[[Op], object]) -> Iterator[tuple[OpOverload, Op]]:
        """Yield the overloads of built-in ops whose record satisfies `fact`, with the record; none that have `out=`.

        The in-place variant of an op is included, unless it has a record of its own.
        """
        for op in filter(fact, self._built_in.values()):
            packet, _, overload = op.name.partition(".")
            in_place = () if overload or f"{packet}_" in self._built_in else overloads(f"{packet}_")
            for func in (*overloads(packet), *in_place):
                if variant_of(func) != "out" and overload in ("", overload_name(func)):
                    yield func, op

    # ---- look-up ----------------------------------------------------------------------------------------------

    def resolve(self, func: OpOverload) -> ResolvedOp:
        """Return the record of an overload; a record without a rule if the op has none.

        >>> resolve(torch.ops.aten.add_.Tensor).key
        'aten::add'
        """
        found = self._resolved.get(func)
        if found is None:
            found = self._resolved[func] = self._resolve(func)
        return found

    def rule_for(self, func: OpOverload) -> ResolvedOp | None:
        """Return the record of an overload; None if it has no rule.

        >>> rule_for(torch.ops.aten.nonzero.default) is None
        True
        """
        found = self.resolve(func)
        return found if found.has_rule else None

    def _resolve(self, func: OpOverload) -> ResolvedOp:
        own = self._built_in.get(overload_key(func)) or self._built_in.get(packet_name(func))
        found: tuple[Op, Operands | None] | None = next(self._candidates(func, self._built_in), None)
        if found is None and own is None:
            own = next((op for find in self._patterns if (op := find(func)) is not None), None)
            found = None if own is None or own.rule is None else (own, None)
        if found is None and self._behind is not None and (generated := self._behind().rule_for(func)) is not None:
            found = generated.op, generated.operands
        if found is None:
            # The record of the op may have a rule for other overloads.
            found = own if own is not None and own.rule is None else Op(overload_key(func)), None
        built_in = resolved = ResolvedOp(func, *found, own)
        by_user = next(self._candidates(func, self._user), None)
        if by_user is not None:
            resolved = ResolvedOp(func, *by_user, own, built_in=built_in)
        built_in.in_place_view = resolved.in_place_view = self._in_place_view(func)
        return resolved

    def _in_place_view(self, func: OpOverload) -> OpOverload | None:
        """Return the view op, such as `t`, for an op that turns a tensor into a view of itself, such as `t_`."""
        if torch.Tag.inplace_view not in func.tags:
            return None
        takes = [(argument.name, str(argument.type)) for argument in schema_of(func).arguments]
        for view in overloads(packet_name(func).removesuffix("_")):
            same = [(argument.name, str(argument.type)) for argument in schema_of(view).arguments] == takes
            if same and self.resolve(view).put is not None:
                return view
        return None

    def _candidates(self, func: OpOverload, table: Mapping[str, Op]) -> Iterator[tuple[Op, Operands]]:
        """Yield the records with a rule that may serve an overload, nearest first, with their operands' positions."""
        own = overload_key(func)
        for name in family(func):
            same = f"{name}.{overload_name(func)}"
            if _has_rule(table, same):
                models = [func] if same == own else [m for m in overloads(name) if overload_key(m) == same]
                yield from _derive(func, table[same], models)
            if _has_rule(table, name):
                yield from _derive(func, table[name], overloads(name))
            for model in overloads(name):
                key = overload_key(model)
                if key != same and _has_rule(table, key):
                    yield from _derive(func, table[key], [model])


def _has_rule(table: Mapping[str, Op], name: str) -> bool:
    return name in table and table[name].rule is not None


def _derive(func: OpOverload, op: Op, models: Iterable[OpOverload]) -> Iterator[tuple[Op, Operands]]:
    """Yield the record with the positions of `func`'s operands, taken from the model that shares most of them.

    Yield nothing if `func` is a variant of no model.
    """
    rule = parse(op.rule) if isinstance(op.rule, str) else op.rule
    best: Operands | None = None
    models = list(models)
    if isinstance(rule, Rule) and models and not any(rule.fits(len(operands_of(m))) for m in models):
        raise RuleError(
            f"the rule {rule!s} of {op.name} has {len(rule.inputs)} operands",
            f"write {len(operands_of(models[0]))} patterns left of the arrow, for {schema_of(models[0])}",
        )
    for model in models:
        # An overload that the rule was written for needs no match: its operands are those of the rule.
        itself = model is func
        operands = tuple(a.position for a in operands_of(func)) if itself else match_operands(func, model)
        fits = operands is not None and (not isinstance(rule, Rule) or rule.fits(len(operands)))
        # If the rule is a function of the call, the overload with the most tensors passes it the most.
        if operands is not None and fits and (best is None or len(operands) > len(best)):
            best = operands
    if best is not None:
        yield op, best


def name_of(op: OpName) -> str:
    """Return the name of an op given in any form: an overload, a packet, or a name such as `aten::add`."""
    if isinstance(op, OpOverload):
        return overload_key(op)
    if isinstance(op, OpOverloadPacket):
        return packet_name(op)
    if "::" not in op:
        raise RuleError(f"no op is called {op!r}", "name it with its namespace, as in aten::add or aten::add.Tensor")
    return op


registry = Registry()
register = registry.register
resolve = registry.resolve
rule_for = registry.rule_for


def definitions_in(module: str) -> Define:
    """Return `define` for a module, whose file the records name as the place of their definition."""
    file = "/".join(module.split(".")[1:]) + ".py"

    def define(names: str | Iterable[str], rule: Source | None = None, **facts: Unpack[Facts]) -> None:
        for name in (names,) if isinstance(names, str) else names:
            registry.define(Op(name, rule, file=file, **facts))

    return define
