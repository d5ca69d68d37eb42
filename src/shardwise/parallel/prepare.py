"""Styles that convert a module's inputs and outputs and leave its parameters unchanged.

>>> PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..sharding.placement import Placement
from .axis import StyleAxis
from .base import ParallelStyle
from .hooks import Args, InputConverter, Kwargs, OutputConverter

Layouts = Placement | tuple[Placement | None, ...] | None


class PrepareModuleInput(ParallelStyle):
    """Distribute a module's inputs, and redistribute them to the desired layouts.

    `input_layouts` are the layouts of the positional arguments that are plain tensors; None leaves an argument
    unchanged. The module gets `desired_input_layouts`. `input_kwarg_layouts` and `desired_input_kwarg_layouts` do the
    same for keyword arguments. With `use_local_output=True` the module gets local tensors.
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
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
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
        converters = self._converters(axis, self.input_layouts or (), self.desired_input_layouts or ())
        named = self._converters(axis, self.input_kwarg_layouts.values(), self.desired_input_kwarg_layouts.values())
        by_name = dict(zip(self.input_kwarg_layouts, named, strict=True))

        def prepare(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            if converters and len(args) != len(converters):
                raise InputError(
                    f"{len(args)} positional arguments for input_layouts={self.input_layouts}",
                    "give one layout for each positional argument, None for those to leave unchanged",
                )
            if converters:
                args = tuple(convert(value) for convert, value in zip(converters, args, strict=True))
            return args, {name: by_name[name](value) if name in by_name else value for name, value in kwargs.items()}

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def _converters(
        self, axis: StyleAxis, layouts: Iterable[Placement | None], desired: Iterable[Placement | None]
    ) -> list[Callable[[object], object]]:
        return [
            _unchanged if of is to is None else InputConverter(axis, of, to, self.use_local_output)
            for of, to in zip(layouts, desired, strict=True)
        ]


class PrepareModuleOutput(ParallelStyle):
    """Distribute a module's outputs, and redistribute them to the desired layouts.

    `output_layouts` are the layouts of the outputs that are plain tensors; None leaves a plain output unchanged. The
    caller gets `desired_output_layouts`, as local tensors, or as DTensors with `use_local_output=False`.
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
        pairs = zip(self.output_layouts or (), self.desired_output_layouts or (), strict=True)
        converters = [
            _unchanged if to is None else OutputConverter(axis, of, to, self.use_local_output) for of, to in pairs
        ]

        def finish(_: nn.Module, __: object, output: object) -> object:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            if len(outputs) != len(converters):
                raise InputError(
                    f"{len(outputs)} outputs for output_layouts={self.output_layouts}",
                    "give one layout for each output, None for those to leave unchanged",
                )
            done = [convert(value) for convert, value in zip(converters, outputs, strict=True)]
            return tuple(done) if outputs is output else done[0]

        module.register_forward_hook(finish)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """Convert a module's inputs and outputs: `PrepareModuleInput` and `PrepareModuleOutput` in one."""

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


def _unchanged(value: object) -> object:
    return value


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts if layouts is None else tuple(layouts)


def _check_pairs(name: str, layouts: Layouts, desired: Layouts) -> None:
    if not isinstance(layouts, tuple) or not isinstance(desired, tuple) or len(layouts) != len(desired):
        raise InputError(f"{name}={layouts} and desired_{name}={desired}", "give both, with one layout for each tensor")
