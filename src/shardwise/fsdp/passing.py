"""The tensors among a module's inputs and outputs: found in nested values, cast, hooked for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._torch import pytree
from .._torch.autograd import QuickFunction
from .._torch.modules import buffers_of, parameters_of
from ..nn.parameters import replicate_rest
from ..sharding.mesh import MeshInfo
from ..tensor.dtensor import DTensor

T = TypeVar("T")


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, fields of dataclasses included."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, each.name) for each in fields(leaf)])


def cast(values: T, dtype: torch.dtype | None) -> T:
    """Return the values with floating-point tensors cast to a dtype; None casts nothing."""

    def of_dtype(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return values if dtype is None else pytree.tree_map(of_dtype, values)


def replicate_buffers(root: nn.Module, mesh_info: MeshInfo) -> None:
    """Replicate the plain buffers of a module and its submodules over a mesh."""
    for module in root.modules():
        if not any(isinstance(b, Tensor) and not isinstance(b, DTensor) for b in buffers_of(module).values()):
            continue
        parameters = dict(parameters_of(module))
        parameters_of(module).clear()  # only buffers are left to replicate
        try:
            replicate_rest(module, mesh_info.mesh, None)
        finally:
            parameters_of(module).update(parameters)


# ---- where backward begins and ends ----------------------------------------------------------------------------------


def before_gradients_of(outputs: object, begin: Callable[[Tensor], None]) -> bool:
    """Call `begin` in backward when the gradient of any output is known. Return whether any output requires one."""
    if not torch.is_grad_enabled():
        return False
    found = [value for value in tensors_in(outputs) if value.requires_grad]
    for value in found:
        value.register_hook(begin)
    return bool(found)


def after_gradients_of(inputs: T, end: Callable[[], None]) -> T:
    """Return the inputs unchanged; in backward, `end` is called when their gradients are known."""
    if not torch.is_grad_enabled():
        return inputs
    leaves, structure = pytree.tree_flatten(inputs)
    places = [i for i, value in enumerate(leaves) if isinstance(value, Tensor) and value.requires_grad]
    if not places:
        return inputs
    for i, value in zip(places, _EndOfBackward.apply(end, *(leaves[i] for i in places)), strict=True):
        leaves[i] = value
    return pytree.tree_unflatten(leaves, structure)


class _EndOfBackward(QuickFunction):
    """The identity on a module's inputs; when its backward runs, the module's parameters are no longer needed."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs."""
        ctx.end = end
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients."""
        ctx.end()
        return (None, *gradients)
