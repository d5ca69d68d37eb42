"""Choose the code that runs on the local shards of a call: the op, a kernel, or a local implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..notation import BoundTensor
from ..ops.drive import JointPieces, Pieces, drive
from ..ops.kernel import KernelRun, LocalCall
from ..sharding.layout import Coordinate, Factor, divides_evenly, pieces
from ..sharding.mesh import MeshInfo
from .bind_call import BoundCall
from .decision import Decision
from .local_call import drawing, fill, of_rank, on_each, skipping_empty, tensors_in
from .result_meta import refuse_what_fails

LocalRun = Callable[..., Any]
"""Takes the local arguments of a call and returns its local results."""


class LocalCode:
    """Chooses what runs on the local shards of a bound call, for a decision on how its operands are sharded."""

    def __init__(self, found: BoundCall, decision: Decision, mesh_info: MeshInfo, in_list: bool) -> None:
        self.found, self.decision, self.mesh_info, self.in_list = found, decision, mesh_info, in_list
        self.op, self.func = found.resolved, found.resolved.func
        factors = found.bound.factors
        self.kernel_factors = tuple(dict.fromkeys(f for _, f in decision.shardings if factors[f].handled_by_kernel))
        """The sharded factors that are handled by a kernel."""

    def makes_new(self) -> bool:
        """Return whether the code returns new tensors even for an op that writes or views: kernels have no `out=`."""
        record = self.op.op
        copies = record.local is not None and record.local.copies
        implemented = record.local is not None or record.draw is not None
        return bool(self.kernel_factors) or copies or (self.op.variant == "out" and implemented)

    def run(self, structure: object) -> tuple[LocalRun, int]:
        """Return the code to run, and its number of collectives. `structure` holds the index of each result."""
        record, mesh_info = self.op.op, self.mesh_info
        if record.draw is not None:
            draw = record.draw
            run = on_each(mesh_info, self._bind_arguments(None), lambda call, at: draw(call))
            return drawing(run, mesh_info, tensors_in(self.found.outputs)[0]), 0
        if self.kernel_factors:
            self._refuse_what_fails(skips_empty=False)
            return self._kernel_run(self.kernel_factors[0])
        if record.local is not None and self._needs_local():
            self._refuse_what_fails(skips_empty=False)
            local = record.local.run
            return on_each(mesh_info, self._bind_arguments(None), lambda call, at: local(call)), 0
        if self._must_skip_empty():
            self._refuse_what_fails(skips_empty=True)
            return self._skipping_empty(structure), 0
        return self.op.python or self.func, 0

    def _needs_local(self) -> bool:
        """Return whether the local implementation is needed instead of the op itself."""
        local = self.op.op.local
        assert local is not None
        if local.when == "partial sum":
            return any(layout.partial for layout in self.decision.results)
        return local.when == "always" or self._has_empty_shard()

    def _refuse_what_fails(self, skips_empty: bool) -> None:
        """Raise the error of the op itself where it is not called, or not on all ranks."""
        if not self.in_list:
            on_cpu = self.mesh_info.device_type == "cpu"
            refuse_what_fails(self.op, *self.found.metas, on_cpu=on_cpu, skips_empty=skips_empty)

    # ---- empty shards -------------------------------------------------------------------------------------------

    def _must_skip_empty(self) -> bool:
        """Return whether a rank with an empty shard must not call the op: many kernels raise there, some crash."""
        if self.op.op.takes_empty or self.decision.has_summands:
            return False
        if self.in_list and not any(layout.partial for layout in self.decision.results):
            return False  # elementwise ops and updates of lists take empty shards; a reduction must not see one
        if any(math.prod(operand.tensor.shape) == 0 for operand in self.found.operands):
            # Only the op knows its results for an empty global tensor; if these are empty, too, it need not run.
            return all(math.prod(result.tensor.shape) == 0 for result in self.found.results)
        return self._has_empty_shard()

    def _has_empty_shard(self) -> bool:
        """Return whether some rank has an empty local shard of some operand."""
        for layout in self.decision.operands:
            for dim in layout.dims:
                for factor in dim:
                    if (_smallest_shard(self.mesh_info, factor) if factor.axes else factor.size) == 0:
                        return True
        return False

    def _skipping_empty(self, structure: object) -> LocalRun:
        layouts, dtypes = self.decision.results, [t.dtype for t in tensors_in(self.found.outputs)]
        identities = [fill(layout, dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
        return skipping_empty(self.op, self.mesh_info, layouts, identities, dtypes, structure)

    # ---- kernels ------------------------------------------------------------------------------------------------

    def _kernel_run(self, factor: int) -> tuple[LocalRun, int]:
        kernel = self.op.kernel(self.found.bound.factors[factor].name)
        pieces = self._pieces()
        make = self._bind_arguments(factor)

        def run(*args: object, **kwargs: object) -> object:
            def start(at: Coordinate, rank: int) -> KernelRun:
                return kernel.run(make(at, of_rank(args, rank), of_rank(kwargs, rank)), pieces.shard(at))

            return drive(pieces, start)

        return run, kernel.rounds

    def _pieces(self) -> Pieces:
        """Return the ranks that communicate in the kernel: those that share its factor, or all its factors if joint."""
        axes = {f: tuple(axis for axis, other in self.decision.shardings if other == f) for f in self.kernel_factors}
        factors = [Factor(self.found.bound.factors[factor].size, axes[factor]) for factor in axes]
        return Pieces(self.mesh_info, factors[0]) if len(factors) == 1 else JointPieces(self.mesh_info, factors)

    def _bind_arguments(self, factor: int | None) -> Callable[..., LocalCall]:
        """Return the function from a rank's coordinate and local arguments to its `LocalCall`."""
        op, func, layouts, given = self.op, self.func, self.decision.results, self.decision.operands
        operands, results = self.found.operands, self.found.results
        dims = tuple(_dim_of(operand.tensor, factor) for operand in operands)
        out_dims = tuple(_dim_of(result.tensor, factor) for result in results)
        shapes = tuple(result.tensor.shape for result in results)
        dtypes = tuple(tensor.dtype for tensor in tensors_in(self.found.outputs))

        def make(at: Coordinate, args: Sequence[object], kwargs: dict[str, object]) -> LocalCall:
            return LocalCall(func, op.arguments(args, kwargs), dims, out_dims, shapes, dtypes, layouts, at, given)

        return make


def _dim_of(tensor: BoundTensor, factor: int | None) -> int | None:
    """Return the dim of a tensor that has the factor; None if it has none."""
    return None if factor is None else next((dim for dim, fs in enumerate(tensor.dims) if factor in fs), None)


def _smallest_shard(mesh_info: MeshInfo, factor: Factor) -> int:
    """Return the size of the smallest shard of a factor: that of the last rank along every axis."""
    size = factor.size
    if divides_evenly(mesh_info.sizes, factor):
        return size // pieces(mesh_info.sizes, factor.axes)
    for axis in factor.axes:
        step = -(-size // mesh_info.sizes[axis])
        size = max(0, size - step * (mesh_info.sizes[axis] - 1))
    return size
