"""Describe an op as text: its rule, factors, kernels, local code and variants.

>>> print(explain("mm"))
aten::mm.default, defined in ops/matmul.py
    mm(Tensor self, Tensor mat2) -> Tensor
served by   its rule
rule        m k, k n -> m n ; linear 0 | 1
factors     m   pass-through
            k   reduced: where it is sharded, the result becomes Partial(sum)
            n   pass-through
Partial     sum, avg   pass through self, or mat2
            max, min   are reduced first
runs        on local shards: the op itself
variants    aten::mm.out, aten::mm.dtype_out, aten::mm.dtype, aten::_foreach_mm.default
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Sequence

from .._torch.ops import OpOverload, packet_name, schema_of
from .._torch.schemas import is_composite
from ..notation import Rule, parse
from ..notation.kind import FactorKind, kind_of
from .call import Call, is_list
from .find import AnyOp, called_with, find_op
from .generated import Source as GeneratedRule
from .kernel import Kernel
from .op import Function, Never, Source
from .registry import resolve
from .resolve import ResolvedOp
from .schema import FOREACH, operands_of, overload_key, overloads, tensor_arguments, variant_of
from .served import runs_without_out, served_by

_SERVED = {
    "decomposition": "decomposition into other ops",
    "gathered": "running on gathered inputs",
}
_FLAGS = {
    "reads_numbers": "the rule reads values of numbers: each value has its own plan",
    "reads_shape_only": "only the shape of the operand is read: a Partial operand need not be reduced",
    "addresses_storage": "an argument is an offset into the storage of the operand",
    "returns_shard": "the result is the local shard, a plain tensor",
    "keeps_sizes": "results have the sizes of the operands' dims",
    "takes_plain": "takes plain tensors, and tensors of several meshes, besides distributed ones",
    "masks_results": "results that output_mask does not request are None",
    "takes_empty": "the op is also called on empty shards",
    "makes_tensors": "plain tensors that PyTorch makes when it decomposes the op are taken as replicated",
    "derivative_makes_tensors": "plain tensors that its derivative formula makes are taken as replicated",
    "batch_rule_makes_tensors": "plain tensors that vmap makes for the op are taken as replicated",
}
_WHEN = {
    "always": "local shards",
    "partial sum": "local shards of calls that leave a partial sum",
    "empty shard": "local shards of calls in which some rank has an empty shard",
}


class Explanation(str):
    """A string that a Python prompt shows without quotes, line by line.

    >>> text = explain("mm")
    >>> text.splitlines()[3]
    'rule        m k, k n -> m n ; linear 0 | 1'
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(op: AnyOp, *args: object, **kwargs: object) -> Explanation:
    """Return what shardwise knows about an op: its rule in notation and in words, kernels, local code, decomposition.

    `op` is an overload, a packet, a name (`"aten::mm"`, `"aten.mm"`, `"mm"`) or a function (`torch.mm`, `F.linear`,
    `torch.Tensor.add_`). Rules that depend on the call are shown for example arguments, if they are given:

    >>> explain(torch.sum, torch.empty(4, 6), 1)
    """
    if not args and not kwargs:
        return Explanation(_explain(find_op(op), None))
    calls = called_with(op, args, kwargs)
    return Explanation("\n\n".join(_explain(func, Call.make(func, given, named)) for func, given, named in calls))


def _explain(func: OpOverload, call: Call | None) -> str:
    found = resolve(func)
    where = f", defined in {found.op.file}" if found.op.file else ""
    lines = [f"{overload_key(func)}{where}", f"    {str(schema_of(func)).removeprefix(func.namespace + '::')}"]
    sections: list[tuple[str, list[str]]] = [("served by", [_served(found)])]
    if found.op.override is not None:
        sections.append(("first", [f"caught above autograd by {_function(found.op.override)}"]))
    sections += _rule_sections(found, call)
    sections += [("kernels", [_kernel(*item) for item in found.op.kernels.items()])]
    sections += [("runs", list(_local(found)))]
    if found.decomposition is not None:
        sections.append(("otherwise", [f"decomposed by {_function(found.decomposition)}"]))
    if found.put is not None:
        sections.append(("writes", [f"to the view reach the viewed tensor by {_function(found.put)}"]))
    sections.append(("notes", list(_notes(found))))
    sections.append(("variants", [", ".join(_variants(found))]))
    for title, texts in sections:
        texts = [text for text in texts if text]
        lines += [f"{title if i == 0 else '':12}{text}" for i, text in enumerate(texts)]
    return "\n".join(line.rstrip() for line in lines)


# ---- the rule -------------------------------------------------------------------------------------------------------


def _served(found: ResolvedOp) -> str:
    kind = served_by(found.func, planned=False if _depends_on_data(found) else None)
    if found.name == "aten::_local_scalar_dense":
        return "reading the number, after gathering it where it must be"
    if not tensor_arguments(found.func):
        return "nothing: it takes no tensors, so what it returns is not distributed"
    if found.in_place_view is not None:
        return f"{_SERVED[kind]}: the tensor becomes the result of {overload_key(found.in_place_view)}"
    if kind in ("rule", "generated"):
        return _by_rule(found)
    if kind == "decomposition" and found.decomposition is None and runs_without_out(found):
        return f"{packet_name(found.func)} without out=, whose results are copied into the out= tensors"
    if found.decomposition is None and is_composite(found.func):
        if found.has_rule and not isinstance(found.op.rule, Never):
            return f"{_SERVED[kind]} by PyTorch; in inference mode by {_by_rule(found)}"
        return f"{_SERVED[kind]} by PyTorch; pass example arguments to see which"
    return _SERVED[kind]


def _by_rule(found: ResolvedOp) -> str:
    if found.op.origin == "user":
        return f"the user's rule for {found.key}"
    if found.op.origin == "elementwise":
        return "its rule, which follows from PyTorch's tag for elementwise ops"
    text = "a generated rule" if found.op.origin == "generated" else "its rule"
    return text if overload_key(found.func) in (found.key, f"{found.key}.default") else f"{text} for {found.key}"


def _rule_sections(found: ResolvedOp, call: Call | None) -> Iterator[tuple[str, list[str]]]:
    source = found.op.rule
    if source is None or found.in_place_view is not None or _depends_on_data(found):
        return
    if isinstance(source, Never):
        yield "rule", [f"of no call: {source.reason}"]
        return
    if callable(source) and not isinstance(source, Rule):
        yield "rule", _function_texts(source, call)
        if call is None:
            return
    rule = _rule_of(found, call)
    if rule is None:
        yield "this call", ["has no rule: it is decomposed, or runs on gathered inputs"]
        return
    yield ("rule" if isinstance(source, (str, Rule)) else "this call"), [str(rule)]
    names = _operand_names(found, rule)
    yield "factors", [f"{name:4}{kind}" for name, kind in _factors(rule)]
    unread = found.op.reads_shape_only or rule.unread
    yield "Partial", ["any        is not reduced: no values are read"] if unread else list(_passing(rule, names))
    built_in = found.built_in
    if built_in is not None and built_in.has_rule:
        same = _rule_of(built_in, call) is rule
        text = "is the same: its kernels and local code serve the op" if same else "is replaced"
        yield "built in", [f"the rule {_source_text(built_in.op.rule)} {text}"]


def _rule_of(found: ResolvedOp, call: Call | None) -> Rule | None:
    if call is None:
        source = found.op.rule
        return parse(source) if isinstance(source, str) else source if isinstance(source, Rule) else None
    made = Call.make(call.op, (), call.arguments, found.operands)
    return found.rule(made.element(0) if found.variant == "foreach" and _has_lists(made) else made)


def _has_lists(call: Call) -> bool:
    return any(is_list(value) for value in call.tensors)


def _function_texts(source: Function, call: Call | None) -> list[str]:
    if isinstance(source, GeneratedRule):
        return [f"the first of these lines that fits the call: {line}" for line in source.texts]
    texts = [f"depends on the call: {_function(source)}"]
    return texts if call is not None else [*texts, "pass example arguments to see the rule of a call"]


def _source_text(source: Source | None) -> str:
    return (
        str(source)
        if isinstance(source, (str, Rule)) or source is None
        else f"by {_function(source).partition(':')[0]}"
    )


def _operand_names(found: ResolvedOp, rule: Rule) -> list[str]:
    schema = schema_of(found.func).arguments
    names = [schema[position].name for position in found.operands if position is not None]
    return names if len(names) == len(rule.inputs) else [f"operand {i}" for i in range(len(rule.inputs))]


def _factors(rule: Rule) -> Iterator[tuple[str, str]]:
    """Yield every factor of a rule, and its kind in words."""
    sides = [[atom for dim in tensor.dims for atom in dim] for tensor in (*rule.inputs, *rule.outputs)]
    inputs, outputs = sides[: len(rule.inputs)], sides[len(rule.inputs) :]
    seen = {atom.name: atom for side in sides for atom in side if atom.name != "_"}
    given = {atom.name for side in inputs for atom in side}
    for name, atom in seen.items():
        text = f"{name}.." if atom.many else name
        without = [i for i, side in enumerate(outputs) if name not in {a.name for a in side}]
        ops = {"same" if rule.unread else rule.reduce[i] for i in without}
        kind = kind_of(atom.replicated, name in rule.kernel, ops)
        if kind is FactorKind.KERNEL:
            more = _after_kernel(rule, without)
        elif kind is FactorKind.REPLICATED:
            more = "" if atom.replicated else ": the op cannot complete a result from shards"
        elif name not in given:
            more = ": its size comes from an argument"
        else:
            more = f": {_reduced(rule, without)}" if without else ""
        yield text, f"{kind.value}{more}"
    if any(atom.name == "_" for side in inputs for atom in side):
        yield "_", FactorKind.REPLICATED.value


def _after_kernel(rule: Rule, without: Sequence[int]) -> str:
    ops = {rule.reduce[i] for i in without}
    return f"; {_reduced(rule, without)}" if ops - {"none", "same"} else ""


def _reduced(rule: Rule, without: Sequence[int]) -> str:
    if rule.unread:
        return "operands give dtype and device only, and results are replicated"
    texts = []
    for i in without:
        result = "the result" if len(rule.outputs) == 1 else f"result {i}"
        op = rule.reduce[i]
        texts.append(f"{result} is the same on all ranks" if op == "same" else f"{result} becomes Partial({op})")
    return f"where it is sharded, {', '.join(dict.fromkeys(texts))}"


def _passing(rule: Rule, names: Sequence[str]) -> Iterator[str]:
    """Yield how Partial operands pass: which of them, and by which reductions."""

    def operands(sets: Sequence[Sequence[int]]) -> str:
        return ", or ".join(" and ".join(names[i] for i in members) for members in sets)

    yield f"sum, avg   {f'pass through {operands(rule.linear)}' if rule.linear else 'are reduced first'}"
    ops = set(rule.reduce) & {"max", "min"}
    if rule.monotone and len(ops) == 1:
        yield f"{ops.pop()}        passes through {operands(rule.monotone)}; the other is reduced first"
    elif rule.monotone:
        yield f"max, min   pass through {operands(rule.monotone)}"
    if rule.antitone:
        yield f"max, min   pass through {operands(rule.antitone)} and change places"
    if not rule.monotone and not rule.antitone:
        yield "max, min   are reduced first"


# ---- what runs ------------------------------------------------------------------------------------------------------


def _kernel(factor: str, kernel: Kernel) -> str:
    rounds = "no communication" if not kernel.rounds else f"{kernel.rounds} collective{'s' * (kernel.rounds > 1)}"
    joint = "; several such dims may be sharded at once" if kernel.joint else ""
    return f"{factor:4}{rounds}{joint}: {_function(kernel.run)}"


def _local(found: ResolvedOp) -> Iterator[str]:
    op = found.op
    no_calls = found.in_place_view is not None or isinstance(op.rule, Never) or _depends_on_data(found)
    if not found.has_rule or no_calls:
        return
    if op.draw is not None:
        yield f"on local shards, with a generator that all ranks share: {_function(op.draw)}"
        return
    if op.list_kernel is not None:
        yield f"on lists of local shards: {_function(op.list_kernel.run)}"
        return
    if op.local is not None:
        yield f"on {_WHEN[op.local.when]}: {_function(op.local.run)}"
        if op.local.when == "always":
            return
    others = "on all other local shards" if op.local is not None else "on local shards"
    yield f"{others}: {_function(found.python) if found.python is not None else 'the op itself'}"


def _notes(found: ResolvedOp) -> Iterator[str]:
    op = found.op
    yield from (text for flag, text in _FLAGS.items() if getattr(op, flag))
    if op.layout_rule is not None:
        yield f"operands of some layouts have another rule: {_function(op.layout_rule)}"
    if op.gradient_of is not None:
        yield f"the result is the gradient of {op.gradient_of}, and is redistributed to its layout"
    if op.updates:
        yield f"the decomposition writes {' and '.join(op.updates)}, though the schema does not say so"
    if op.cpu_dtypes is not None:
        yield f"on CPUs results have other dtypes than the meta kernel returns: {_function(op.cpu_dtypes)}"
    if op.strides is not None:
        yield f"strides of results: {op.strides}"
    if _depends_on_data(found):
        yield "the result depends on data, so no rule takes a call"


def _depends_on_data(found: ResolvedOp) -> bool:
    """Return whether the result's shape depends on data.

    A rule that is a function may be more precise for some calls.
    """
    source = found.op.rule
    with_out = overloads(packet_name(found.func)) if runs_without_out(found) else ()
    same = (resolve(other) for other in with_out if variant_of(other) == "functional")
    needs_data = found.needs_data or any(other.needs_data and other.op is found.op for other in same)
    return needs_data and (isinstance(source, Rule) or not callable(source))


def _variants(found: ResolvedOp) -> Iterator[str]:
    """Yield the other overloads that the same record serves: in-place, `out=`, scalar and foreach variants."""
    if not found.has_rule:
        return
    namespace, _, base = packet_name(found.func).removesuffix("_").rpartition("::")
    base = base.removeprefix(FOREACH)
    for name in (base, f"{base}_", f"{FOREACH}{base}", f"{FOREACH}{base}_"):
        for func in overloads(f"{namespace}::{name}"):
            if func is not found.func and resolve(func).op is found.op and operands_of(func):
                yield overload_key(func)


def _function(function: Function) -> str:
    """Return a function as `name (file): first line of its docstring`; a closure as the function that made it."""
    if isinstance(function, functools.partial):
        return ", ".join(_function(part) for part in (function.func, *function.args) if callable(part))
    name = getattr(function, "__qualname__", type(function).__qualname__).partition(".<locals>")[0]
    module = getattr(function, "__module__", None) or ""
    maker = getattr(sys.modules.get(module), name, function)
    doc = (inspect.getdoc(function) or inspect.getdoc(maker) or "").partition("\n")[0]
    doc = doc.removeprefix("Return the rule: ").removeprefix("Return ")
    doc = doc[:1].upper() + doc[1:]
    package, _, path = module.partition(".")
    where = f"{path.replace('.', '/')}.py" if package == __package__.partition(".")[0] else module
    return f"{name} ({where})" + (f": {doc}" if doc else "")
