"""Forward hooks that convert a module's inputs and outputs. `torch.compile` traces them, and records conversions."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from .._torch import pytree
from .converters import InputConverter, OutputConverter, convert_input, convert_output

Args = tuple[object, ...]
Kwargs = dict[str, object]


def register_input_hook(module: nn.Module, leading: list[InputConverter], others: InputConverter | None) -> None:
    """Convert the leading arguments of a module's calls, each with its converter, and other tensors with `others`."""
    names = list(inspect.signature(module.forward).parameters)[: len(leading)]

    def prepare(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if len(args) == 1 and not kwargs:
            value = args[0]
            return (convert_input(leading[0], value) if isinstance(value, Tensor) else value,), kwargs
        # A tensor that is passed twice stays one tensor: attention tests whether its query is its key.
        converted: list[tuple[Tensor, InputConverter, Tensor]] = []

        def convert(value: object, converter: InputConverter | None) -> object:
            if converter is None or not isinstance(value, Tensor):
                return value
            for source, its, result in converted:
                if source is value and its is converter:
                    return result
            converted.append((value, converter, convert_input(converter, value)))
            return converted[-1][2]

        converters = [*leading, *[others] * len(args)]
        new_args = tuple(map(convert, args, converters))
        by_name = dict(zip(names, leading, strict=False))
        return new_args, {name: convert(value, by_name.get(name, others)) for name, value in kwargs.items()}

    module.register_forward_pre_hook(prepare, with_kwargs=True)


def register_output_hook(module: nn.Module, converter: OutputConverter) -> None:
    """Convert what a module returns: a tensor, or the tensors in a tuple, list or dict."""

    def finish(_: nn.Module, args: Args, output: object) -> object:
        return convert_output(converter, output) if isinstance(output, Tensor) else convert_outputs(converter, output)

    module.register_forward_hook(finish)


def convert_outputs(converter: OutputConverter, output: object) -> object:
    """Convert a tensor, or the tensors in a tuple, list or dict."""
    return pytree.tree_map_only(Tensor, lambda value: convert_output(converter, value), output)
