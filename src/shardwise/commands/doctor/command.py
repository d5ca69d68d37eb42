"""The command: its options, its text and its JSON."""

from __future__ import annotations

import argparse
import json
import math
import os

from ...comm.plan import bytes_text, seconds_text
from ..command import Command, UsageError
from ..mesh import Mesh, add_mesh_argument, mesh_text, parse_mesh
from ..progress import Progress
from .machine import machine
from .ranks import Findings, default_mesh, device_for, launched, try_here, try_on_processes

_EXAMPLES = """
shardwise doctor
shardwise doctor --mesh dp=2,tp=4 --json
torchrun --nproc-per-node 8 -m shardwise doctor --mesh dp=2,tp=4
"""
_MESSAGE = {"cpu": 4 << 20, "cuda": 64 << 20}
_MOST_PROCESSES = 64


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the mesh to test, such as dp=2,tp=4 (default: all GPUs, or dp=2,tp=2 on processes of this machine)"
    add_mesh_argument(parser, required=False, help=text)
    parser.add_argument("--seconds", type=float, default=120.0, help="the longest that ranks may take (default: 120)")


def _run(given: argparse.Namespace) -> int:
    mesh = parse_mesh(given.mesh) if given.mesh else default_mesh()
    ranks = math.prod(mesh.values())
    if not launched() and ranks > _MOST_PROCESSES:
        raise UsageError(f"--mesh {mesh_text(mesh)} needs {ranks} processes: start them with torchrun")
    if launched() and ranks != int(os.environ["WORLD_SIZE"]):
        raise UsageError(f"--mesh {mesh_text(mesh)} has {ranks} ranks, and torchrun started {os.environ['WORLD_SIZE']}")
    device = device_for(ranks)
    if launched():
        found = try_here(mesh, device, _MESSAGE[device])
    else:
        with Progress(f"testing {mesh_text(mesh)} on {ranks} processes"):
            found = try_on_processes(mesh, device, _MESSAGE[device], given.seconds)
    about = machine()
    if os.environ.get("RANK", "0") == "0":
        shown = (about, mesh, device, found)
        print(json.dumps(_data(*shown), indent=2) if given.json else _text(*shown))
    return 0 if about["torch_is_supported"] and not any(check.problem for check in found.checks) else 1


def _data(about: dict[str, object], mesh: Mesh, device: str, found: Findings) -> dict[str, object]:
    measured = found.measured
    return {
        "machine": about,
        "mesh": mesh,
        "device": device,
        "checks": [{"name": check.name, "ok": not check.problem, "problem": check.problem} for check in found.checks],
        "axes": {name: axis._asdict() for name, axis in measured.axes.items()} if measured else {},
        "pack": measured.pack if measured else None,
        "cost_model": measured.code() if measured else None,
    }


def _text(about: dict[str, object], mesh: Mesh, device: str, found: Findings) -> str:
    backends = about["backends"]
    assert isinstance(backends, dict)
    old = "" if about["torch_is_supported"] else "  (too old)"
    lines = [
        f"shardwise {about['shardwise']}, torch {about['torch']}{old}, Python {about['python']}, {about['platform']}",
        f"{about['cpus']} CPUs, {about['gpus']} GPUs; backends: {', '.join(n for n, has in backends.items() if has)}",
        "",
        f"mesh {mesh_text(mesh)} on {math.prod(mesh.values())} processes, {'NCCL' if device == 'cuda' else 'gloo'}",
    ]
    lines += [f"  {'FAILED' if check.problem else 'ok':<7}{check.name}" for check in found.checks]
    lines += [f"\n{check.name}: {check.problem}" for check in found.checks if check.problem]
    if found.measured is None:
        return "\n".join(lines)
    lines += ["", f"{'axis':<8}{'latency':>10}{'bandwidth':>14}{'p2p latency':>14}{'p2p bandwidth':>16}"]
    for name, axis in found.measured.axes.items():
        rates = f"{bytes_text(axis.bandwidth)}/s", f"{bytes_text(axis.p2p_bandwidth)}/s"
        times = seconds_text(axis.latency), seconds_text(axis.p2p_latency)
        lines.append(f"{name:<8}{times[0]:>10}{rates[0]:>14}{times[1]:>14}{rates[1]:>16}")
    lines += ["", "To plan with these figures, on all ranks:", "", found.measured.code()]
    return "\n".join(lines)


COMMAND = Command("test a mesh on this machine and measure what communication costs", _EXAMPLES, _add_arguments, _run)
