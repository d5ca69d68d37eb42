"""`shardwise plan SOURCE TARGET --mesh AXES`: the steps from one sharding to another."""

from __future__ import annotations

import argparse
import json

from ..comm.plan import SpecPlan, Step, bytes_text, received_exactly, seconds_text
from ..comm.redistribute import plan_redistribution
from ..sharding.mesh import names_text
from ..sharding.spec import DTensorSpec
from ..sharding.spec_parse import parse_spec
from ..sharding.spec_text import spec_text
from .command import Command, UsageError
from .mesh import add_device_argument, add_mesh_argument, simulated_mesh

_EXAMPLES = """
shardwise plan "f32[8@dp,16]" "f32[8,16@tp]" --mesh dp=2,tp=4
shardwise plan "bf16[4096,4096] sum(tp)" "bf16[4096@tp,4096]" --mesh tp=8 --device cuda
shardwise plan "f32[10@tp]" "f32[10]" --mesh tp=4 --json
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help='the spec to start from, such as "f32[8@dp, 16]"')
    parser.add_argument("target", help='the spec to reach, such as "f32[8, 16@tp]" or "f32[8, 16] sum(dp)"')
    add_mesh_argument(parser, required=True)
    add_device_argument(parser)


def _run(given: argparse.Namespace) -> int:
    with simulated_mesh(given.mesh, given.device) as mesh:
        source, target = parse_spec(given.source, mesh), parse_spec(given.target, mesh)
        if (source.shape, source.dtype) != (target.shape, target.dtype):
            raise UsageError(f"{source} and {target} are different tensors: give both the same shape and dtype")
        found = plan_redistribution(source, target)
        print(json.dumps(_data(found), indent=2) if given.json else _text(found))
    return 0


def _data(found: SpecPlan) -> dict[str, object]:
    spec, names = found.source, found.source.mesh_info.names
    steps = [
        {
            "kind": step.kind,
            "label": step.label(),
            "axes": [names[axis] for axis in step.axes],
            "received_bytes": int(received_exactly(step, spec.dtype.itemsize)),
            "seconds": step.seconds,
            "padded": step.is_padded,
            "after": spec_text(step.after, spec.dtype, names),
        }
        for step in found.plan.steps
    ]
    return {
        "mesh": dict(zip(names, spec.mesh_info.sizes, strict=True)),
        "device": spec.mesh_info.device_type,
        "source": repr(spec),
        "target": repr(found.target),
        "steps": steps,
        "collectives": found.plan.collectives,
        "received_bytes": _received(found),
        "seconds": found.plan.seconds,
    }


def _received(found: SpecPlan) -> int:
    return sum(int(received_exactly(step, found.source.dtype.itemsize)) for step in found.plan.steps)


def _text(found: SpecPlan) -> str:
    """Return the plan as text: a line for each step, with its axes, the bytes that a rank receives, time and result."""
    rows = [_row(number, step, found.source) for number, step in enumerate(found.plan.steps, 1)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{found.source} -> {found.target}"]
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, "<<<>><", widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    number, received = found.plan.collectives, bytes_text(_received(found))
    device = found.source.mesh_info.device_type
    lines.append(
        f"{number} collective{'' if number == 1 else 's'}, {received} received by a rank, "
        f"{seconds_text(found.plan.seconds)} by the cost model of {device}"
    )
    return "\n".join(lines)


def _row(number: int, step: Step, spec: DTensorSpec) -> list[str]:
    names = spec.mesh_info.names
    over = f"over {names_text([names[axis] for axis in step.axes])}" if step.axes else "locally"
    received = bytes_text(received_exactly(step, spec.dtype.itemsize))
    after = spec_text(step.after, spec.dtype, names) + ("   padded" if step.is_padded else "")
    return [f"{number}.", step.label(), over, received, seconds_text(step.seconds), after]


COMMAND = Command("print the steps from one sharding to another", _EXAMPLES, _add_arguments, _run)
