"""Converters of a module's inputs and outputs: distribute, redistribute, or take the local tensor.

A plain tensor becomes a DTensor with the layout that the style gives for it; a DTensor is redistributed to the desired
layout. The target is computed once for each spec, so a tensor that has the desired layout costs one look-up.

Several modules often get the same input: q, k and v of an attention. The last converted input is cached, so that one
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
from ..sharding.cache import ENTRY_BYTES, Cache
from ..sharding.placement import AnyShard, Placement
from ..sharding.runtime import WorldCache, WorldState
from ..sharding.spec import DTensorSpec, contiguous_meta, normalize_placements
from ..tensor.autograd import to_spec
from ..tensor.dtensor import DTensor
from .axis import StyleAxis
from .last_input import LastInput

_TARGET_BYTES = 1 << 20
_CONVERTERS: WorldCache[object, InputConverter | OutputConverter] = WorldCache("converters", max_bytes=1 << 18)
"""Converters for the methods of styles, which get mesh and layouts at each call. Keys contain the id of the mesh, which
a cached converter keeps alive."""


Targets = Cache[DTensorSpec, DTensorSpec]
"""The target of each spec that a converter has met."""


class _State:
    """A converter's data of one world: the axis, and the target of each spec that it has converted."""

    def __init__(self, axis: StyleAxis) -> None:
        self.axis = axis
        self.targets: Targets = Cache(_TARGET_BYTES, lambda spec, target: ENTRY_BYTES)
        self.last = LastInput(GATHERED.of(axis.mesh_info.runtime))


class Converter:
    """Converts one value of a module: a plain tensor has `layout`, and the result has the layout `desired`.

    None as `layout` leaves plain tensors plain; None as `desired` keeps the layout. With `use_local` the result is the
    local tensor. `dim_size` is the global size of the dim in which a plain tensor is sharded, if the module determines
    it. Otherwise all ranks are assumed to have shards of one size, without communication to check it.

    Compiled graphs hold converters as constants and may outlive the world, so the world's runtime owns their state.
    """

    def __init__(
        self,
        axis: StyleAxis,
        layout: Placement | None,
        desired: Placement | None,
        use_local: bool = False,
        dim_size: int | None = None,
    ) -> None:
        state = _STATES.of(axis.mesh_info.runtime)[self] = _State(axis)
        self._state = ref(state)
        self.layout, self.desired, self.use_local = layout, desired, use_local
        self.dim_size = dim_size
        self.key = (id(axis.mesh_info), layout, desired, use_local)

    def _ended(self) -> NoReturn:
        raise MeshError(
            "a module was called that was parallelized over a mesh whose world has ended",
            "make the module again, and call parallelize_module(module, mesh, plan) in the present world",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Converter:
        return self

    def _convert(self, value: Tensor, state: _State) -> Tensor:
        axis = state.axis
        if not isinstance(value, DTensor) or (not axis.is_only_axis and axis.is_local(value)):
            value = self._distribute(value, axis)
            if not isinstance(value, DTensor):
                return value
        if self.desired is not None:
            value = redistribute_axis(value, axis, self.desired, state.targets)
        return axis.to_local(value) if self.use_local else value

    def _distribute(self, value: Tensor, axis: StyleAxis) -> Tensor:
        """Return a local tensor as a DTensor with `layout`; without a layout, unchanged."""
        if transforms_active() and isinstance(innermost(value), DTensor):
            return value  # wrapped by a transform: the wrapper can neither be redistributed nor has a local tensor
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
                f"a module's plain input cannot be a shard with the layout {self.layout}: {error.problem}",
                "pass the module a DTensor, which knows its global shape: in a style before it, use_local_output=False",
            ) from None


_STATES: WorldState[WeakKeyDictionary[Converter, _State]] = WorldState(WeakKeyDictionary)


class InputConverter(Converter):
    """Converts one input of a module. The last result is cached, since several modules often get the same input."""

    def __call__(self, value: object) -> object:
        """Return the input for the module; values that are not tensors are unchanged."""
        return convert_input(self, value) if isinstance(value, Tensor) else value

    def convert(self, value: Tensor) -> Tensor:
        """Return the tensor that the module gets."""
        state = self._state() or self._ended()
        if transforms_active():  # their wrappers of tensors are not cached
            return self._convert(value, state)
        if isinstance(value, DTensor) and not self.use_local and state.targets.recent.get(value._spec) is value._spec:
            return value
        key = (self.key, torch.is_grad_enabled())
        found = state.last.find(value, key)
        if found is None:
            found = self._convert(value, state)
            state.last.keep(value, key, found)
        return found


class OutputConverter(Converter):
    """Converts one output of a module."""

    def __call__(self, value: object) -> object:
        """Return the output for the caller; values that are not tensors are unchanged."""
        return convert_output(self, value) if isinstance(value, Tensor) else value

    def convert(self, value: Tensor) -> Tensor:
        """Return the tensor that the caller gets."""
        return self._convert(value, self._state() or self._ended())


# Functions, not methods: a compiled graph passes the converter to them as a constant.
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
    """Return the converter of inputs for these arguments, from the world's cache."""
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
    """Return the converter of outputs for these arguments, from the world's cache."""
    converters = _CONVERTERS.of(adopt(mesh).runtime)
    key = (id(mesh), layout, desired, use_local, "output", axis)
    found = converters.get(key)
    if found is None:
        found = OutputConverter(StyleAxis(mesh, axis), layout, desired, use_local)
        converters[key] = found
    assert isinstance(found, OutputConverter)
    return found


def redistribute_axis(tensor: DTensor, axis: StyleAxis, placement: Placement, targets: Targets) -> DTensor:
    """Return the tensor redistributed to this placement on one axis. `targets` caches the target of each spec."""
    spec = tensor._spec
    target = targets.get(spec)
    if target is None:
        if spec.mesh_info is not axis.mesh_info:
            raise MeshError(
                f"a module that was parallelized over {axis.mesh_info!r} got an input {spec!r} on {spec.mesh_info!r}",
                f"pass the mesh of its inputs to parallelize_module; styles act on its axis {axis.name!r}",
            )
        target = targets[spec] = _with_placements(spec, axis.placements_with(tensor, placement))
    return tensor if target is spec else to_spec(tensor, target)


def _with_placements(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    """Return the spec with these placements: itself if the layout is the same, so that no autograd node is made."""
    normal, order = normalize_placements(spec.mesh_info, placements, spec.ndim)
    target = DTensorSpec(spec.mesh, normal, spec.tensor_meta, order)
    if target.layout is spec.layout:
        return spec
    return target.with_meta(contiguous_meta(spec.shape, spec.dtype))
