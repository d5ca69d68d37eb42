"""A module with its parameters distributed gives the one-device answer, forward and backward."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from shardwise import Partial, Placement, Replicate, Shard, distribute_tensor
from tests.training.parameters import whole_of


def random_placements(tensor: Tensor, mesh: DeviceMesh, rng: random.Random, partial: bool = False) -> list[Placement]:
    """One placement for each axis. Any dim may be sharded, over any axes."""
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()) if tensor.shape[dim])]
    if partial and tensor.is_floating_point():
        choices.append(Partial())
    return [rng.choice(choices) for _ in range(mesh.ndim)]


def distributed(module: nn.Module, mesh: DeviceMesh, rng: random.Random) -> nn.Module:
    """A copy whose parameters and buffers are sharded at random; tied ones stay tied."""
    module = copy.deepcopy(module)
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in made:
                cut = distribute_tensor(parameter.detach(), mesh, random_placements(parameter, mesh, rng))
                made[id(parameter)] = nn.Parameter(cut, parameter.requires_grad)
            setattr(part, name, made[id(parameter)])  # which modules that list their weights see
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = distribute_tensor(buffer, mesh, random_placements(buffer, mesh, rng))
    return module


def spread(values: Any, mesh: DeviceMesh, rng: random.Random) -> Any:
    """Inputs, sharded at random."""

    def place(tensor: Tensor) -> Tensor:
        cut = distribute_tensor(tensor.detach(), mesh, random_placements(tensor, mesh, rng, partial=True))
        return cut.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, place, values)


def fresh(values: Any) -> Any:
    """Inputs with gradients of their own."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), values)


def results(module: nn.Module, args: Any, kwargs: Any, around: Callable[[Any], Any]) -> dict[str, Any]:
    """The outputs, the gradients of inputs and parameters, and the buffers, all on one device."""
    outputs = module(*args, **kwargs)
    found: dict[str, Any] = {}
    flat = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
    for index, output in enumerate(flat):
        found[f"output {index}"] = output
    ending = [t for t in flat if t.requires_grad]
    if ending:
        generator = torch.Generator().manual_seed(7)
        cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in ending]
        torch.autograd.backward(ending, [around(g) for g in cotangents])
    for index, value in enumerate(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
        found[f"gradient of input {index}"] = value.grad
    for name, parameter in module.named_parameters():
        found[f"gradient of {name}"] = parameter.grad
        if parameter.grad is not None and hasattr(parameter, "placements"):
            assert parameter.grad.placements == parameter.placements, name
    for name, buffer in module.named_buffers():
        found[f"buffer {name}"] = buffer
    return {name: whole_of(value) for name, value in found.items()}


def compare(module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh, seed: int, **close: float) -> None:
    """Raise where the distributed module differs from the plain one."""
    rng = random.Random(seed)
    if any(nn.parameter.is_lazy(p) for p in module.parameters()):
        module(*fresh(args), **fresh(kwargs))  # learns its shapes
    many = distributed(module, mesh, rng)
    one = copy.deepcopy(module)
    torch.manual_seed(seed)
    wanted = results(one, *fresh((args, kwargs)), lambda value: value)
    torch.manual_seed(seed)
    cut_args, cut_kwargs = spread((args, kwargs), mesh, rng)
    found = results(many, cut_args, cut_kwargs, lambda value: distribute_tensor(value, mesh, [Replicate()] * mesh.ndim))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (value is None) == (found[name] is None), f"{name} is {found[name]} instead of {value}"
        if value is not None:
            say = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(found[name].detach(), value.detach(), **close, equal_nan=True, msg=say)
