"""The option --mesh: a mesh as text, and a simulated world that has it."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..sharding.mesh import DeviceMesh, init_device_mesh
from ..world import simulate
from .command import UsageError

Mesh = dict[str, int]
"""The sizes of the axes, by name."""

_AXIS = re.compile(r"([A-Za-z_]\w*)=([1-9]\d*)")


def parse_mesh(text: str) -> Mesh:
    """Return the axes of a mesh written as `dp=2,tp=4`."""
    sizes: Mesh = {}
    position = 0
    for part in text.split(","):
        found = _AXIS.fullmatch(part.strip())
        if found is None or found[1] in sizes:
            problem = f"axis {found[1]} is given twice" if found else f"{part.strip()!r} is not an axis with its size"
            shown = f"    {text}\n    {' ' * position}{'^' * max(len(part), 1)}"
            raise UsageError(f"{problem}\n{shown}\nwrite --mesh dp=2,tp=4")
        sizes[found[1]] = int(found[2])
        position += len(part) + 1
    return sizes


def mesh_text(sizes: Mesh) -> str:
    """Return a mesh as it is written on the command line."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def add_mesh_argument(parser: argparse.ArgumentParser, *, required: bool, help: str = "") -> None:
    """Add the option --mesh."""
    text = help or "the axes of the mesh and their sizes, such as dp=2,tp=4"
    parser.add_argument("--mesh", required=required, metavar="AXES", help=text)


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option --device, which selects the default cost model."""
    parser.add_argument(
        "--device",
        metavar="TYPE",
        help="whose costs are modelled: cpu, or cuda and other accelerators (default: what this machine has)",
    )


@contextmanager
def simulated_mesh(text: str, device: str | None = None) -> Iterator[DeviceMesh]:
    """Enter a simulated world, and yield a mesh over all its ranks."""
    sizes = parse_mesh(text)
    with simulate(math.prod(sizes.values())):
        yield init_device_mesh(device or _this_device(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _this_device() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
