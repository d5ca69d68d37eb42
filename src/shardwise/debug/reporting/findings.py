"""The warnings of a report: parameters sharded in a way that costs memory or correctness, and costly lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ...comm.plan import bytes_text, seconds_text
from ...sharding.mesh import names_text
from ...sharding.spec import DTensorSpec
from ...tensor.dtensor import DTensor
from ..explaining.records import Communication, Total
from .folded import starred
from .holders import Held, memory_by_rank

_LARGE = 0.1
"""A replicated parameter is large if it is this share of what a rank holds."""
_UNEVEN = 1.02
"""Shards are reported as uneven if the largest is this much larger than the mean."""
_MUCH = 0.5
"""A line is reported if it has this share of the modelled time of all communication."""


@dataclass(frozen=True)
class Finding:
    """One warning: a title, a sentence with details, and what to do."""

    severity: str
    """ "error" for what is probably wrong, "warning" for what is probably wasteful, "note" for the rest."""
    title: str
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return the fields as plain values."""
        return asdict(self)


def findings(tensors: Sequence[Held], communications: Sequence[Communication]) -> list[Finding]:
    """Return the warnings, the worst first."""
    found = [*_unreduced(tensors), *_plain(tensors), *_replicated(tensors), *_uneven(tensors)]
    found += [*_without_rule(communications), *_costly_line(communications), *_unbalanced(tensors)]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _unreduced(tensors: Sequence[Held]) -> Iterator[Finding]:
    for each in tensors:
        for what, spec in ((each.kind, each.spec), ("gradient", _gradient_spec(each))):
            if spec is None or not spec.layout.partial:
                continue
            over = names_text([spec.mesh_info.names[axis] for axis, _ in spec.layout.partial])
            owner = each.name if what != "gradient" else f"the gradient of {each.name}"
            yield Finding(
                "error",
                f"{owner} is not reduced over {over}",
                f"{spec} is Partial: every rank holds a term of it, and what reads the local tensor reads a term.",
                f"redistribute it, for example with placements={_replicated_text(spec)}",
            )


def _plain(tensors: Sequence[Held]) -> Iterator[Finding]:
    plain = [each for each in tensors if each.spec is None and each.kind == "parameter"]
    if not plain or len(plain) == sum(each.kind == "parameter" for each in tensors):
        return
    yield Finding(
        "warning",
        f"{_count(len(plain), 'parameter')} {'is' if len(plain) == 1 else 'are'} not distributed",
        f"{_names(plain)}: nothing keeps the copies of ranks equal, unless the program reduces their gradients itself.",
        "distribute_module(model, mesh) replicates what no plan names",
    )


def _replicated(tensors: Sequence[Held]) -> Iterator[Finding]:
    """Yield a warning for each large parameter that is replicated over an axis over which others are sharded."""
    memory = max(memory_by_rank(list(tensors)).values(), default=0)
    used = {axis for each in tensors for axis, text in each.axes if text.startswith("shards")}
    for name, group in _alike(tensors).items():
        over = [axis for axis, text in group[0].axes if text == "replicates" and axis in used]
        held = sum(each.held for each in group)
        if over and held >= _LARGE * memory:
            names = names_text([axis.partition("=")[0] for axis in over])
            yield Finding(
                "warning",
                f"{name} is replicated over {names}",
                f"{bytes_text(held)}, {held / memory:.0%} of what a rank holds. Others are sharded over {names}.",
                "name it in the plan of parallelize_module, or use fully_shard",
            )


def _uneven(tensors: Sequence[Held]) -> Iterator[Finding]:
    """Yield one note that lists all tensors with uneven shards."""
    uneven = []
    for name, group in _alike(tensors).items():
        spec, shares = group[0].spec, list(group[0].rank_bytes.values())
        if spec is None or spec.layout.is_even() or max(shares) * len(shares) < _UNEVEN * sum(shares):
            continue
        empty = sum(1 for share in shares if not share)
        nothing = f", {empty} of {len(shares)} nothing" if empty else ""
        uneven.append(f"{name} ({spec}): ranks hold {bytes_text(min(shares))} to {bytes_text(max(shares))}{nothing}")
    if uneven:
        title = f"{_count(len(uneven), 'tensor')} with uneven shards"
        yield Finding("note", title, "; ".join(uneven) + ".", "pad the sharded dims to a multiple of the ranks")


def _alike(tensors: Sequence[Held]) -> dict[str, list[Held]]:
    """Return the tensors by name, with one entry for those of numbered modules that are sharded alike."""
    found: dict[tuple[str, str], list[Held]] = {}
    for each in tensors:
        found.setdefault((starred(each.name), each.sharding), []).append(each)
    return {name if len(group) > 1 else group[0].name: group for (name, _), group in found.items()}


def _unbalanced(tensors: Sequence[Held]) -> Iterator[Finding]:
    memory = memory_by_rank(list(tensors))
    if memory and min(memory.values()) * 1.25 < max(memory.values()):
        most, least = (pick(memory, key=memory.__getitem__) for pick in (max, min))
        text = f"Rank {most} holds {bytes_text(memory[most])}, rank {least} {bytes_text(memory[least])}."
        yield Finding("warning", "ranks hold different amounts of parameters", text, "shard dims that the axes divide")


def _without_rule(communications: Sequence[Communication]) -> Iterator[Finding]:
    ops: dict[str, list[Communication]] = {}
    for each in communications:
        if each.cause == "gathered inputs":
            ops.setdefault(each.op or "an op", []).append(each)
    for op, members in ops.items():
        total = Total.of(members)
        lines = ", ".join(dict.fromkeys(str(each.line) for each in members if each.line is not None))
        yield Finding(
            "warning",
            f"{op} runs on gathered inputs",
            f"It has no rule: {bytes_text(total.bytes)} are gathered ({lines}), and every rank computes all of it.",
            "give it a rule with shardwise.register_sharding",
        )


def _costly_line(communications: Sequence[Communication]) -> Iterator[Finding]:
    total = Total.of(communications)
    lines: dict[str, list[Communication]] = {}
    for each in communications:
        if each.line is not None:
            lines.setdefault(str(each.line), []).append(each)
    if len(lines) < 2:
        return
    for line, members in lines.items():
        own = Total.of(members)
        if own.seconds >= _MUCH * total.seconds > 0:
            text = f"{_count(own.count, 'collective')}, {bytes_text(own.bytes)}, {seconds_text(own.seconds)} modelled."
            yield Finding("note", f"{line} has {own.seconds / total.seconds:.0%} of the communication", text)


def _gradient_spec(each: Held) -> DTensorSpec | None:
    gradient = each.tensor.grad if each.tensor.is_leaf else None
    return gradient.spec if isinstance(gradient, DTensor) else None


def _replicated_text(spec: DTensorSpec) -> str:
    partial = dict(spec.layout.partial)
    return str([("Replicate()" if axis in partial else "...") for axis in range(len(spec.mesh_info.names))]).replace(
        "'", ""
    )


def _names(tensors: Sequence[Held]) -> str:
    names = [each.name for each in tensors[:4]]
    return ", ".join(names) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
