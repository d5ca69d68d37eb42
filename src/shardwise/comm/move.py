"""A move: a step of a plan bound to a mesh, ready to run on local tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..sharding.mesh import MeshInfo
from .on_ranks import LocalOp
from .plan import Step


class Move(NamedTuple):
    """A step as functions: `finish(wait(start(local)))`, without the wait if `communicates` is False.

    `start` packs the data and starts the collective; `finish` unpacks what was received, None if that is the result.
    `nbytes` is about what these functions hold in memory. `copies` means that the collective copies its input before
    it returns, so that the input may be written.
    """

    start: LocalOp
    communicates: bool
    finish: LocalOp | None
    nbytes: int = 1024
    copies: bool = False


def group_of_step(step: Step, mesh_info: MeshInfo) -> tuple[str, int]:
    """Return the name and the number of ranks of the group that a step communicates in."""
    return mesh_info.groups[step.axes], math.prod(mesh_info.sizes[axis] for axis in step.axes)
