"""register_sharding: the rule of an op, as one line or in PyTorch's form."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import overload

from .._torch.ops import OpOverload, overload_name, schema_of
from .._torch.schemas import is_dispatched
from ..errors import InputError
from ..notation import Rule, RuleError, parse
from ..notation.rule import NO_DIMS
from ..ops.call import Call
from ..ops.kernel import Kernel
from ..ops.registry import OpName, name_of, register, resolve
from ..ops.schema import overloads, tensor_arguments
from ..ops.served import decomposed_first
from .placement_rows import RowsFunction, rule_from_rows


@overload
def register_sharding(
    op: OpName | list[OpOverload],
    rule: str | Callable[[Call], str],
    *,
    kernels: Mapping[str, Kernel] | None = None,
) -> None: ...


@overload
def register_sharding(op: OpName | list[OpOverload], rule: None = None) -> Callable[[RowsFunction], RowsFunction]: ...


def register_sharding(
    op: OpName | list[OpOverload],
    rule: str | Callable[[Call], str] | None = None,
    *,
    kernels: Mapping[str, Kernel] | None = None,
) -> Callable[[RowsFunction], RowsFunction] | None:
    """Register the sharding rule of an op, which takes the place of the op's present rule.

    `op` is an overload, a list of overloads, or all overloads of an op: `torch.ops.aten.mm`, `"aten::mm"`.
    `rule` is one line in the notation of `shardwise.rules`, or a function of the call that returns one; `kernels` has a
    kernel for each factor that its `kernel` clause names. Without a rule this is a decorator for a function in
    PyTorch's form: it takes the op's arguments and returns a list of acceptable
    `(output placements, input placements)` on one mesh axis.

    >>> register_sharding(torch.ops.mylib.scale_rows.default, "m n, m -> m n ; linear 0 | 1")
    >>> rows, factors = ones(8, 4, device_mesh=mesh, placements=P("dp")), ones(8, device_mesh=mesh, placements=P("dp"))
    >>> torch.ops.mylib.scale_rows(rows, factors).spec
    f32[8@dp, 4]
    """
    ops = op if isinstance(op, list) else [op]
    if rule is not None:
        if isinstance(rule, str):
            for each in ops:
                _check_rule(each, parse(rule))
        for each in ops:
            _warn_if_decomposed(each)
            register(each, rule, kernels)
        return None
    if kernels is not None:
        raise InputError(
            "register_sharding got kernels= without a rule",
            "pass the rule whose `kernel` clause names their factors, register_sharding(op, rule, kernels=kernels), "
            "or leave kernels= out above a function in PyTorch's form",
        )

    def decorate(rows_of: RowsFunction) -> RowsFunction:
        for each in ops:
            _warn_if_decomposed(each)
            register(each, functools.partial(rule_from_rows, rows_of))
        return rows_of

    return decorate


def _overloads_of(op: OpName) -> list[OpOverload]:
    """Return the overloads that are meant by an op, or by its name; raise if there are none."""
    if isinstance(op, OpOverload):
        return [op]
    name, _, overload = name_of(op).partition(".")
    found = [func for func in overloads(name) if is_dispatched(func) and overload in ("", overload_name(func))]
    if not found:
        raise RuleError(f"no op is called {op!r}", "define the op first, or pass a name such as aten::add")
    return found


def _warn_if_decomposed(op: OpName) -> None:
    """Warn if PyTorch decomposes an op before its rule is asked for."""
    if all(decomposed_first(resolve(func)) for func in _overloads_of(op)):
        warnings.warn(
            f"a rule of {op} is used in inference mode alone: elsewhere PyTorch decomposes the op first. Register "
            "rules of the ops that it calls, which shardwise.rules.explain shows if you pass it example arguments, too",
            stacklevel=3,
        )


def _check_rule(op: OpName, rule: Rule) -> None:
    """Raise if a rule has more or fewer operands or results than the op has tensors."""
    errors = [_misfit(func, rule) for func in _overloads_of(op)]
    if None not in errors and errors[0] is not None:
        raise errors[0]


def _misfit(op: OpOverload, rule: Rule) -> RuleError | None:
    """Return the error of a rule that does not fit an overload, or None."""
    operands = sum(not argument.out for argument in tensor_arguments(op))
    if not rule.fits(operands):
        return RuleError(
            f"the rule {rule!s} has {len(rule.inputs)} operands, {op} has {operands}",
            f"write one pattern for each tensor argument of {schema_of(op)}",
        )
    results = sum("Tensor" in str(result.type) for result in schema_of(op).returns)
    written = sum(argument.write for argument in tensor_arguments(op))
    if len(rule.outputs) not in (results, results or written) and not (results == 0 and rule.outputs == (NO_DIMS,)):
        return RuleError(
            f"the rule {rule!s} has {len(rule.outputs)} results, {op} has {results}",
            f"write one pattern for each tensor result of {schema_of(op)}",
        )
    return None
