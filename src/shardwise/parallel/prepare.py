"""Styles that convert a module's inputs and outputs and leave its parameters unchanged.

>>> PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..sharding.placement import Placement, as_placement
from .axis import StyleAxis
from .base import ParallelStyle
from .converters import (
    InputConverter,
    OutputConverter,
    convert_input,
    convert_output,
    input_converter,
    output_converter,
)
from .hooks import Args, Kwargs

Layouts = Placement | tuple[Placement | None, ...] | None


class PrepareModuleInput(ParallelStyle):
    """Distribute a module's inputs, and redistribute them to the desired layouts.

    `input_layouts` are the layouts of the positional arguments that are plain tensors; None leaves an argument
    unchanged. The module gets `desired_input_layouts`. `input_kwarg_layouts` and `desired_input_kwarg_layouts` do the
    same for keyword arguments. With `use_local_output=True` the module gets local tensors.

    >>> style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    >>> model = parallelize_module(model, mesh["tp"], style)
    >>> model(torch.ones(2, 4)).shape                       # each rank passes 2 rows, and the module gets all 4
    torch.Size([4, 4])
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        self.input_kwarg_layouts = {name: as_placement(p) or p for name, p in (input_kwarg_layouts or {}).items()}
        desired = desired_input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = {name: as_placement(p) or p for name, p in desired.items()}
        self.use_local_output = use_local_output
        self.with_kwargs = input_kwarg_layouts is not None
        if self.input_layouts is not None or self.desired_input_layouts is not None:
            _check_pairs("input_layouts", self.input_layouts, self.desired_input_layouts)
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise InputError(
                f"input_kwarg_layouts names {list(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{list(self.desired_input_kwarg_layouts)}",
                "name the same arguments in both",
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        if not self._overrides(
            PrepareModuleInput, "_prepare_input_fn", "_prepare_input_kwarg_fn", "_prepare_input_arg"
        ):
            module.register_forward_pre_hook(self._hook(axis), with_kwargs=True)
        elif self.with_kwargs:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._prepare_input_kwarg_fn(args, kwargs, device_mesh), with_kwargs=True
            )
        else:
            module.register_forward_pre_hook(lambda _, args: self._prepare_input_fn(args, device_mesh))
        return module

    def _hook(self, axis: StyleAxis) -> Callable[[nn.Module, Args, Kwargs], tuple[Args, Kwargs]]:
        """Return a hook that does the same as the methods, with converters that are made once."""
        converters = self._converters(axis, self.input_layouts or (), self.desired_input_layouts or ())
        named = self._converters(axis, self.input_kwarg_layouts.values(), self.desired_input_kwarg_layouts.values())
        by_name = dict(zip(self.input_kwarg_layouts, named, strict=True))

        def prepare(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            if converters:
                self._check_count(args)
                args = tuple([_converted(value, by) for by, value in zip(converters, args, strict=True)])
            if kwargs:
                kwargs = {name: _converted(value, by_name.get(name)) for name, value in kwargs.items()}
            return args, kwargs

        return prepare

    def _prepare_input_fn(self, inputs: object, device_mesh: DeviceMesh) -> object:
        """Return the positional arguments that the module gets."""
        if not self.input_layouts or self.desired_input_layouts is None:
            return inputs
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        self._check_count(args)
        pairs = zip(args, self.input_layouts, self.desired_input_layouts, strict=True)
        return tuple(self._prepare_input_arg(value, device_mesh, of, to) for value, of, to in pairs)

    def _prepare_input_kwarg_fn(
        self, inputs: object, kwarg_inputs: Kwargs, device_mesh: DeviceMesh
    ) -> tuple[object, Kwargs]:
        """Return the positional and the keyword arguments that the module gets."""
        layouts, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return self._prepare_input_fn(inputs, device_mesh), {
            name: self._prepare_input_arg(value, device_mesh, layouts.get(name), desired.get(name))
            for name, value in kwarg_inputs.items()
        }

    def _prepare_input_arg(
        self, input: object, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> object:
        """Return what the module gets for one argument."""
        if input_layout is desired_layout is None:
            return input
        return input_converter(mesh, input_layout, desired_layout, self.use_local_output, axis=self.axis)(input)

    def _check_count(self, args: Args) -> None:
        if len(args) != len(self.input_layouts or ()):
            raise InputError(
                f"the module got {len(args)} positional arguments for input_layouts={self.input_layouts}",
                "give one layout for each positional argument, None for those to leave unchanged",
            )

    def _converters(
        self, axis: StyleAxis, layouts: Iterable[Placement | None], desired: Iterable[Placement | None]
    ) -> list[InputConverter | None]:
        return [
            None if of is to is None else InputConverter(axis, of, to, self.use_local_output)
            for of, to in zip(layouts, desired, strict=True)
        ]


class PrepareModuleOutput(ParallelStyle):
    """Distribute a module's outputs, and redistribute them to the desired layouts.

    `output_layouts` are the layouts of the outputs that are plain tensors; None leaves a plain output unchanged. The
    caller gets `desired_output_layouts`, as local tensors, or as DTensors with `use_local_output=False`.

    >>> style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    >>> model = parallelize_module(model, mesh["tp"], style)
    >>> model(torch.ones(2, 4)).shape                       # each rank returns 2 rows, and the caller gets all 4
    torch.Size([4, 4])
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts)
        self.desired_output_layouts = _as_tuple(desired_output_layouts)
        self.use_local_output = use_local_output
        _check_pairs("output_layouts", self.output_layouts, self.desired_output_layouts)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = StyleAxis(device_mesh, self.axis)
        if self._overrides(PrepareModuleOutput, "_prepare_out_fn"):
            module.register_forward_hook(lambda _, __, output: self._prepare_out_fn(output, device_mesh))
        else:
            converters = [
                OutputConverter(axis, of, to, self.use_local_output) if to else None for of, to in self._pairs
            ]
            module.register_forward_hook(lambda _, __, output: self._convert(output, converters))
        return module

    def _prepare_out_fn(self, outputs: object, device_mesh: DeviceMesh) -> object:
        """Return what the caller gets for the outputs of the module."""
        return self._convert(
            outputs,
            [
                output_converter(device_mesh, of, to, self.use_local_output, axis=self.axis) if to else None
                for of, to in self._pairs
            ],
        )

    @property
    def _pairs(self) -> list[tuple[Placement | None, Placement | None]]:
        return list(zip(self.output_layouts or (), self.desired_output_layouts or (), strict=True))

    def _convert(self, output: object, converters: list[OutputConverter | None]) -> object:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        if len(outputs) != len(converters):
            raise InputError(
                f"the module returned {len(outputs)} outputs for output_layouts={self.output_layouts}",
                "give one layout for each output, None for those to leave unchanged",
            )
        done = [_converted(value, by) for by, value in zip(converters, outputs, strict=True)]
        return tuple(done) if outputs is output else done[0]


class PrepareModuleInputOutput(ParallelStyle):
    """Convert a module's inputs and outputs: `PrepareModuleInput` and `PrepareModuleOutput` in one.

    >>> style = PrepareModuleInputOutput(
    ...     input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_input=True,
    ...     output_layouts=Replicate(), desired_output_layouts=Shard(0),
    ... )
    >>> model = parallelize_module(model, mesh["tp"], style)
    >>> model(torch.ones(2, 4)).shape                       # the module runs on all 4 rows, the caller gets its own 2
    torch.Size([2, 4])
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | tuple[Placement | None, ...],
        desired_output_layouts: Placement | tuple[Placement, ...],
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in (self.prepare_module_input, self.prepare_module_output):
            style.axis, style.src_data_rank = self.axis, self.src_data_rank
            style._apply(module, device_mesh)
        return module


def _converted(value: object, by: InputConverter | OutputConverter | None) -> object:
    """Return the value, converted if it is a tensor and there is a converter."""
    if by is None or not isinstance(value, Tensor):
        return value
    return convert_input(by, value) if isinstance(by, InputConverter) else convert_output(by, value)


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    single = as_placement(layouts)
    return (single,) if single is not None else tuple(as_placement(layout) or layout for layout in layouts)  # type: ignore[union-attr]


def _check_pairs(name: str, layouts: Layouts, desired: Layouts) -> None:
    if not isinstance(layouts, tuple) or not isinstance(desired, tuple) or len(layouts) != len(desired):
        raise InputError(
            f"{name}={layouts} and desired_{name}={desired} do not match",
            "give both, with as many layouts, one for each tensor",
        )
