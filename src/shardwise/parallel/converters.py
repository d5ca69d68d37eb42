"""Converters of a module's inputs and outputs: distribute, redistribute, or take the local tensor.

A plain tensor becomes a DTensor with the layout that the style gives for it; a DTensor is redistributed to the desired
layout. The target is computed once for each spec, so a tensor that has the desired layout costs one look-up.

Several modules often get the same input: q, k and v of an attention. The last converted input is kept, so that one
gather serves all of them, and one reduction in the backward pass.
"""

from __future__ import annotations

from typing import NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.dynamo import constant_in_graphs, in_graph
from .._torch.transforms import innermost, transforms_active
from ..comm.groups import adopt
from ..dispatch.gather_cache import GATHERED
from ..errors import MeshError, ShapeError
from ..sharding.placement import AnyShard, Placement
from ..sharding.runtime import WorldCache, WorldState
from ..sharding.spec import DTensorSpec, contiguous_meta, normalize_placements
from ..tensor.autograd import to_spec
from ..tensor.dtensor import DTensor
from .axis import StyleAxis
from .last_input import LastInput

_MAX_TARGETS = 4096
_CONVERTERS: WorldCache[object, InputConverter | OutputConverter] = WorldCache("converters", max_bytes=1 << 18)
"""For methods of styles that get all they need as arguments. A converter keeps its mesh, so that the id is its own."""


class _Kept:
    """What a converter keeps of its world: the axis, and the target of each spec that it has converted."""

    def __init__(self, axis: StyleAxis) -> None:
        self.axis = axis
        self.targets: dict[DTensorSpec, DTensorSpec] = {}
        self.last = LastInput(GATHERED.of(axis.mesh_info.runtime))


class Converter:
    """Converts one value of a module: a plain tensor has `layout`, and the result has the layout `desired`.

    None as `layout` leaves plain tensors plain; None as `desired` keeps the layout. With `use_local` the result is the
    local tensor. `dim_size` is the global size of the dim in which a plain tensor is sharded, if the module determines
    it. Otherwise the shards of all ranks are taken to be alike: nothing is communicated to find out.

    A converter is a constant of graphs, whose guards may outlive the world. So the world's runtime owns what it keeps.
    """

    def __init__(
        self,
        axis: StyleAxis,
        layout: Placement | None,
        desired: Placement | None,
        use_local: bool = False,
        dim_size: int | None = None,
    ) -> None:
        kept = _KEPT.of(axis.mesh_info.runtime)[self] = _Kept(axis)
        self._kept = ref(kept)
        self.layout, self.desired, self.use_local = layout, desired, use_local
        self.dim_size = dim_size
        self.key = (id(axis.mesh_info), layout, desired, use_local)

    def _ended(self) -> NoReturn:
        raise MeshError(
            "a module was called that was parallelized over a mesh whose world has ended",
            "parallelize it in the present world",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Converter:
        return self

    def _convert(self, value: Tensor, kept: _Kept) -> Tensor:
        axis = kept.axis
        if not isinstance(value, DTensor) or (not axis.is_only_axis and axis.is_local(value)):
            value = self._distribute(value, axis)
            if not isinstance(value, DTensor):
                return value
        if self.desired is not None:
            value = redistribute_axis(value, axis, self.desired, kept.targets)
        return axis.to_local(value) if self.use_local else value

    def _distribute(self, value: Tensor, axis: StyleAxis) -> Tensor:
        """Return a local tensor as a DTensor with `layout`; without a layout, unchanged."""
        if transforms_active() and isinstance(innermost(value), DTensor):
            return value  # in the wrapper of a transform, which can be neither redistributed nor handed out as local
        if self.layout is None:
            return value
        shape = None
        if self.dim_size is not None and axis.is_only_axis and isinstance(self.layout, AnyShard):
            sizes = list(value.shape)
            sizes[self.layout.dim] = self.dim_size
            shape = tuple(sizes)
        try:
            return axis.from_local(value, self.layout, shape)
        except ShapeError as error:
            raise ShapeError(
                f"a module's plain input, whose layout is {self.layout}: {error.problem}",
                "pass the module a DTensor, which knows its global shape: in a style before it, use_local_output=False",
            ) from None


_KEPT: WorldState[WeakKeyDictionary[Converter, _Kept]] = WorldState(WeakKeyDictionary)


class InputConverter(Converter):
    """Converts one input of a module. Modules in a row often get the same one, so that the last one is kept."""

    def __call__(self, value: object) -> object:
        """Return the input for the module; values that are not tensors are unchanged."""
        return convert_input(self, value) if isinstance(value, Tensor) else value

    def convert(self, value: Tensor) -> Tensor:
        """Return the tensor that the module gets."""
        kept = self._kept() or self._ended()
        if transforms_active():  # the wrappers that they make are no tensors to remember
            return self._convert(value, kept)
        if isinstance(value, DTensor) and not self.use_local and kept.targets.get(value._spec) is value._spec:
            return value
        key = (self.key, torch.is_grad_enabled())
        found = kept.last.find(value, key)
        if found is None:
            found = self._convert(value, kept)
            kept.last.keep(value, key, found)
        return found


class OutputConverter(Converter):
    """Converts one output of a module."""

    def __call__(self, value: object) -> object:
        """Return the output for the caller; values that are not tensors are unchanged."""
        return convert_output(self, value) if isinstance(value, Tensor) else value

    def convert(self, value: Tensor) -> Tensor:
        """Return the tensor that the caller gets."""
        return self._convert(value, self._kept() or self._ended())


# As functions of the converter, which a compiled graph holds as a constant.
constant_in_graphs(InputConverter)
constant_in_graphs(OutputConverter)
convert_input = in_graph(InputConverter.convert)


@in_graph
def convert_output(converter: OutputConverter, value: Tensor) -> Tensor:
    """Return the tensor that the caller gets."""
    return converter.convert(value)


# ---- converters of a world -------------------------------------------------------------------------------------------


def input_converter(
    mesh: DeviceMesh,
    layout: Placement | None,
    desired: Placement | None,
    use_local: bool = False,
    *,
    dim_size: int | None = None,
    axis: str | None = None,
) -> InputConverter:
    """Return the converter for inputs of this kind: the same one at each call."""
    converters = _CONVERTERS.of(adopt(mesh).runtime)
    key = (id(mesh), layout, desired, use_local, dim_size, axis)
    found = converters.get(key)
    if found is None:
        found = InputConverter(StyleAxis(mesh, axis), layout, desired, use_local, dim_size)
        converters[key] = found
    assert isinstance(found, InputConverter)
    return found


def output_converter(
    mesh: DeviceMesh, layout: Placement | None, desired: Placement | None, use_local: bool, *, axis: str | None = None
) -> OutputConverter:
    """Return the converter for outputs of this kind: the same one at each call."""
    converters = _CONVERTERS.of(adopt(mesh).runtime)
    key = (id(mesh), layout, desired, use_local, "output", axis)
    found = converters.get(key)
    if found is None:
        found = OutputConverter(StyleAxis(mesh, axis), layout, desired, use_local)
        converters[key] = found
    assert isinstance(found, OutputConverter)
    return found


def redistribute_axis(
    tensor: DTensor, axis: StyleAxis, placement: Placement, targets: dict[DTensorSpec, DTensorSpec]
) -> DTensor:
    """Return the tensor redistributed to this placement on one axis. `targets` caches the target of each spec."""
    spec = tensor._spec
    target = targets.get(spec)
    if target is None:
        if spec.mesh_info is not axis.mesh_info:
            raise MeshError(
                f"an input {spec!r} on {spec.mesh_info!r} for a module that was parallelized over {axis.mesh_info!r}",
                f"pass the mesh of its inputs to parallelize_module; styles act on its axis {axis.name!r}",
            )
        if len(targets) >= _MAX_TARGETS:
            targets.clear()
        target = targets[spec] = _with_placements(spec, axis.placements_with(tensor, placement))
    return tensor if target is spec else to_spec(tensor, target)


def _with_placements(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    """Return the spec with these placements: itself if the layout is the same, so that no autograd node is made."""
    normal, order = normalize_placements(spec.mesh_info, placements, spec.ndim)
    target = DTensorSpec(spec.mesh, normal, spec.tensor_meta, order)
    if target.layout is spec.layout:
        return spec
    return target.with_meta(contiguous_meta(spec.shape, spec.dtype))
