"""A move: a step of a plan bound to a mesh, ready to run on local tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..sharding.mesh import MeshInfo
from .on_ranks import LocalOp
from .plan import Step


class Move(NamedTuple):
    """`finish(wait(start(local)))`; no wait if nothing is communicated, no finish if nothing is left to do.

    `start` packs the data and begins the collective, `finish` unpacks what was received. `nbytes` is about what these
    functions keep in memory. `copies` says that the collective itself copies its input before it returns.
    """

    start: LocalOp
    communicates: bool
    finish: LocalOp | None
    nbytes: int = 1024
    copies: bool = False


def group_of_step(step: Step, mesh_info: MeshInfo) -> tuple[str, int]:
    """The name and the number of ranks of the group that a step communicates in."""
    return mesh_info.groups[step.axes], math.prod(mesh_info.sizes[axis] for axis in step.axes)
