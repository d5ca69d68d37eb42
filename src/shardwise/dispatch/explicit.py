"""What to write so that an op needs no communication: redistribute calls that were tried before they are told.

>>> redistributions([("self", spec)], [None], communicates)
['self = self.redistribute(placements=[Replicate()])']
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from ..errors import LayoutError, PlacementError
from ..sharding.layout import default_order
from ..sharding.placement import InterleavedShard, P, Partial, Placement, Replicate, Shard
from ..sharding.spec import DTensorSpec

Specs = list[DTensorSpec]


def redistributions(
    given: Sequence[tuple[str, DTensorSpec]],
    wanted: Sequence[DTensorSpec | None],
    communicates: Callable[[Specs], bool],
) -> list[str]:
    """One statement for each tensor that has to be redistributed.

    `given` are the names and specs of the tensors, `wanted` what a plan would bring them to (None: leaves them),
    `communicates` says whether the op would still communicate with other specs.
    """
    specs = [spec for _, spec in given]
    aim = [spec if want is None else want for spec, want in zip(specs, wanted, strict=True)]
    for candidate in _candidates(specs, aim):
        if not communicates(candidate):
            pairs = zip(given, candidate, strict=True)
            return [
                f"{name} = {name}.redistribute(placements={_text(new)})" for (name, old), new in pairs if new is not old
            ]
    return ["give the operands placements on which this op is local"]


def _candidates(specs: Specs, wanted: Specs) -> Iterator[Specs]:
    """What a plan asks for, then the same with more and more axes replicated."""
    for start in (wanted, specs):
        for count in range(len(specs[0].mesh_info.sizes) + 1):
            for axes in itertools.combinations(range(len(specs[0].mesh_info.sizes)), count):
                try:
                    found = [_replicated_on(spec, axes) for spec in start]
                    for spec in found:
                        _text(spec)
                except (LayoutError, PlacementError):
                    continue
                yield found


def _replicated_on(spec: DTensorSpec, axes: Sequence[int]) -> DTensorSpec:
    if not axes:
        return spec
    left = [Replicate() if axis in axes else placement for axis, placement in enumerate(spec.placements)]
    if left == list(spec.placements):
        return spec
    return DTensorSpec(spec.mesh, left, spec.tensor_meta)


def _text(spec: DTensorSpec) -> str:
    """Placements as one writes them in a program."""
    if spec.shard_order == default_order(spec.placements):
        return f"[{', '.join(map(_placement_text, spec.placements))}]"
    if any(isinstance(placement, InterleavedShard) for placement in spec.placements):
        raise LayoutError(f"{spec!r} is both interleaved and cut in another order")
    dims: list[str | tuple[str, ...] | None] = [None] * len(spec.shape)
    for dim, axes in spec.shard_order:
        names = tuple(spec.mesh_info.names[axis] for axis in axes)
        dims[dim] = names if len(names) > 1 else names[0]
    partial = {spec.mesh_info.names[a]: p.reduce_op for a, p in enumerate(spec.placements) if isinstance(p, Partial)}
    return repr(P(*dims, partial=partial))


def _placement_text(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return f'Partial("{placement.reduce_op}")'
    if type(placement) is Shard:
        return f"Shard({placement.dim})"
    return repr(placement)
