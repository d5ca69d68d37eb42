"""Show ops on distributed tensors in PyTorch's profiler and `DebugMode`.

In a profile: `shardwise::mm f32[8@dp, 4], f32[4, 4]` around the local op, and
`shardwise::redistribute f32[8@dp, 4] -> f32[8, 4] (all-gather over dp)` around its collectives. In the list of a
`DebugMode`: ops as those of PyTorch's own DTensor, and `redistribute_input(t: f32[2, 4], trace: S(0)->R)`.

The observers are added while one of the tools is active. Without them, ops and redistributions cost no more time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from torch import Tensor

from .._torch.ops import OpOverload, packet_name
from .._torch.tools import (
    DebugMode,
    call_while_debugging,
    call_while_profiling,
    record_function,
    shows_op,
    shows_redistribution,
)
from ..comm.redistribute import REDISTRIBUTIONS, plan_redistribution
from ..dispatch.arguments import Args, Kwargs, distributed
from ..dispatch.observe import OPS
from ..errors import ShardwiseError
from ..sharding.mesh import names_text
from ..sharding.placement import Partial, Placement, Replicate, Shard
from ..sharding.spec import DTensorSpec


class _Profilers:
    """The observers that all active profilers share."""

    def __init__(self) -> None:
        self._active: list[ExitStack] = []

    def begin(self) -> None:
        """Add the observers when a profiler starts."""
        stack = ExitStack()
        if not self._active:
            stack.enter_context(OPS.observing(_profiled_op))
            stack.enter_context(REDISTRIBUTIONS.observing(_profiled_redistribution))
        self._active.append(stack)

    def end(self) -> None:
        """Remove the observers when the last profiler stops."""
        if self._active:
            self._active.pop().close()


class _DebugModes:
    """The observers of each `DebugMode` that is active."""

    def __init__(self) -> None:
        self._active: list[ExitStack] = []

    def begin(self, mode: DebugMode) -> None:
        """Add the observers of a mode that was entered."""

        def op(func: OpOverload, args: Args, kwargs: Kwargs) -> AbstractContextManager[object]:
            return shows_op(mode, func, args, kwargs)

        def redistribution(source: DTensorSpec, target: DTensorSpec, local: Tensor) -> AbstractContextManager[object]:
            what = f"{_placements(source)}->{_placements(target)}"
            return shows_redistribution(mode, local, source, target, what)

        stack = ExitStack()
        stack.enter_context(OPS.observing(op))
        stack.enter_context(REDISTRIBUTIONS.observing(redistribution))
        self._active.append(stack)

    def end(self, mode: DebugMode) -> None:
        """Remove the observers of the mode that was entered last."""
        if self._active:
            self._active.pop().close()


def _profiled_op(func: OpOverload, args: Args, kwargs: Kwargs) -> AbstractContextManager[object]:
    specs = ", ".join(repr(tensor._spec) for tensor in distributed(args, kwargs))
    return record_function(f"shardwise::{packet_name(func).partition('::')[2]} {specs}")


def _profiled_redistribution(source: DTensorSpec, target: DTensorSpec, local: Tensor) -> AbstractContextManager[object]:
    names = source.mesh_info.names
    steps = [step for step in plan_redistribution(source, target).plan.steps if step.axes]
    how = ", ".join(f"{step.kind} over {names_text([names[axis] for axis in step.axes])}" for step in steps)
    return record_function(f"shardwise::redistribute {source!r} -> {target!r}{f' ({how})' if how else ''}")


def _placements(spec: DTensorSpec) -> str:
    """Return placements as PyTorch's tools write them: `S(0)R`."""
    try:
        return "".join(map(_short, spec.placements))
    except ShardwiseError:  # no list of placements describes this layout
        return repr(spec)


def _short(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return f"S({placement.dim})" if type(placement) is Shard else repr(placement)


_profilers, _debug_modes = _Profilers(), _DebugModes()
call_while_profiling(_profilers.begin, _profilers.end)
call_while_debugging(_debug_modes.begin, _debug_modes.end)
