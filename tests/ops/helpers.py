"""What tests of ops share: meshes, tensors on them, and what was communicated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import DTensor, Placement, Replicate
from shardwise.dispatch.modes import explicit
from shardwise.testing import check
from shardwise.testing.values import make_dtensor

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def r(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same random tensor each time."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-9, 9, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)


def table(cases: Sequence[Case]) -> Any:
    """A table of cases, as parameters of a test."""
    return pytest.mark.parametrize(("fn", "args"), [case[1:] for case in cases], ids=[case[0] for case in cases])


def check_case(fn: Callable[..., Any], args: Sequence[Any], limit: int = 8, **options: Any) -> None:
    """The one-device answer for a sample of all placements; loosely where half precision rounds."""
    dtypes = {value.dtype for value in args if isinstance(value, Tensor)}
    if dtypes & {torch.bfloat16, torch.float16}:
        options |= {"rtol": 5e-2, "atol": 5e-2}
    assert check(fn, *args, limit=limit, **options).cases


@contextmanager
def ranks(*sizes: int) -> Iterator[DeviceMesh]:
    """A simulated mesh."""
    count = 1
    for size in sizes:
        count *= size
    with shardwise.simulate(count):
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c", "d")[: len(sizes)])


def on(mesh: DeviceMesh, tensor: Tensor, *placements: Placement, grad: bool = False) -> DTensor:
    """A tensor with these placements; Replicate on axes that are not named."""
    padded = [*placements, *[Replicate()] * (mesh.ndim - len(placements))]
    made = make_dtensor(tensor, mesh, padded, seed=0)
    return made.requires_grad_() if grad else made


def whole(tensor: DTensor) -> Tensor:
    """The global value, which is the same on all ranks."""
    return shardwise.world.common(tensor.detach().full_tensor())


@contextmanager
def no_communication() -> Iterator[None]:
    """Inside, an op that communicates is an error."""
    with explicit():
        yield


def communication(fn: Callable[[], Any]) -> list[str]:
    """What the ops of a function communicate, in words. Running on gathered inputs counts, too."""
    with DTensor._op_dispatcher.recording() as plans:
        fn()
    return [
        f"{op.func}: {text}"
        for op, plan, *_ in plans
        for text in (plan.communication if plan is not None else ["decomposed or run on gathered inputs"])
    ]
