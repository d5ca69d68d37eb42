"""What happens to a tensor on its way into a module, and out of it.

Plain tensors become distributed by the layout that the style says they have; distributed ones are brought to the layout
that is desired. Both are worked out once for each spec: a tensor that is right already passes at the cost of a look-up.

Several modules often take the same input: q, k and v of an attention. The last tensor that was prepared is remembered,
so that one gather serves all of them, and one reduction in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import MeshError
from ..sharding.placement import Placement, Shard
from ..sharding.spec import DTensorSpec, contiguous_meta, normalize_placements
from ..tensor.autograd import to_spec
from ..tensor.dtensor import DTensor
from .axis import StyleAxis
from .last_input import LAST_INPUT
from .sizes import KnownSizes, mark_exposed

_MAX_TARGETS = 4096


class Entrance:
    """One tensor's way into a module. `layout` is that of plain tensors, `desired` what the module gets."""

    def __init__(
        self,
        axis: StyleAxis,
        layout: Placement | None,
        desired: Placement | None,
        use_local: bool = False,
        dim_size: int | None = None,
    ) -> None:
        self.axis, self.layout, self.desired, self.use_local = axis, layout, desired, use_local
        self.dim_size = dim_size  # of the dim that a plain tensor is cut in, where the module knows it
        self.targets: dict[DTensorSpec, DTensorSpec] = {}
        cut = isinstance(layout, Shard) and axis.alone
        self.sizes = KnownSizes(axis.mesh_info, layout) if cut else None  # type: ignore[arg-type]
        self.key = (id(axis.mesh_info), layout, desired, use_local)

    def __call__(self, value: Any) -> Any:
        """The tensor as the module gets it. Other values pass."""
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) and not self.use_local and self.targets.get(value._spec) is value._spec:
            return value
        last = LAST_INPUT.of(self.axis.mesh_info.runtime)
        key = (self.key, torch.is_grad_enabled())
        found = last.find(value, key)
        if found is None:
            found = self._prepare(value)
            last.keep(value, key, found)
        return found

    def _prepare(self, value: Tensor) -> Tensor:
        tensor = self._distributed(value)
        if not isinstance(tensor, DTensor):
            return tensor
        if self.desired is not None:
            tensor = moved(tensor, self.axis, self.desired, self.targets)
        return self.axis.detach(tensor) if self.use_local else tensor

    def _distributed(self, value: Tensor) -> Tensor:
        if isinstance(value, DTensor) and not self.axis.is_detached(value):
            return value
        if self.layout is None:
            return value
        if self.sizes is None:
            return self.axis.attach(value, self.layout)
        if self.dim_size is not None:
            shape = list(value.shape)
            shape[self.layout.dim] = self.dim_size  # type: ignore[attr-defined]
            return self.axis.attach(value, self.layout, tuple(shape))
        tensor = self.axis.attach(value, self.layout, self.sizes.whole_shape(value))
        self.sizes.learn(tensor)
        return tensor


class Exit:
    """One tensor's way out of a module. `layout` is that of plain tensors, `desired` what comes out."""

    def __init__(self, axis: StyleAxis, layout: Placement | None, desired: Placement, use_local: bool) -> None:
        self.axis, self.desired, self.use_local = axis, desired, use_local
        self.hands_out = use_local and axis.alone and isinstance(desired, Shard)
        self.enter = Entrance(axis, layout, None)
        self.targets: dict[DTensorSpec, DTensorSpec] = {}

    def __call__(self, value: Any) -> Any:
        """The tensor as the caller gets it. Other values pass."""
        tensor = self.enter._distributed(value) if isinstance(value, Tensor) else value
        if not isinstance(tensor, DTensor):
            return tensor
        tensor = moved(tensor, self.axis, self.desired, self.targets)
        if not self.use_local:
            return tensor
        if self.hands_out:
            mark_exposed(tensor._spec)
        return self.axis.detach(tensor)


def moved(tensor: DTensor, axis: StyleAxis, placement: Placement, targets: dict[DTensorSpec, DTensorSpec]) -> DTensor:
    """The tensor with one axis doing this to it. `targets` remembers where each spec goes."""
    spec = tensor._spec
    target = targets.get(spec)
    if target is None:
        if spec.mesh_info is not axis.mesh_info:
            raise MeshError(
                f"an input {spec!r} on {spec.mesh_info!r} for a module that was parallelized over {axis.mesh_info!r}",
                "parallelize the module over the mesh of its inputs; styles act on its axis 'tp'",
            )
        if len(targets) >= _MAX_TARGETS:
            targets.clear()
        target = targets[spec] = _placed(spec, axis.placed(tensor, placement))
    return tensor if target is spec else to_spec(tensor, target)


def _placed(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    """The same spec where these are its placements already: then there is nothing to do, in the backward neither."""
    normal, order = normalize_placements(spec.mesh_info, placements, spec.ndim)
    target = DTensorSpec(spec.mesh, normal, spec.tensor_meta, order)
    if target.layout is spec.layout:
        return spec
    return target.with_meta(contiguous_meta(spec.shape, spec.dtype))
