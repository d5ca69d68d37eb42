"""The sides that a program runs on: plain tensors, or distributed tensors of the running world.

A side has the functions that lines of a program call:

leaf      a tensor with random values that depend on its seed alone
move      the same tensor with other placements; on plain tensors a copy
twice     a hook that doubles a gradient
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...sharding.placement import InterleavedShard, P, Partial, Placements, Replicate, Shard
from ...tensor.dtensor import DTensor
from ..values import make_dtensor

AXES = ("a", "b", "c")
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0)


def leaf_value(shape: Sequence[int], dtype: torch.dtype, seed: int, special: bool = False) -> Tensor:
    """Return random values with few digits, so that sums of some of them are exact in any order.

    With `special`, some are NaN, infinite or zero.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, tuple(shape), generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0 if not dtype.is_signed else -3, 5, tuple(shape), generator=generator).to(dtype)
    value = torch.randint(-12, 13, tuple(shape), generator=generator).double() / 4
    if dtype.is_complex:
        value = torch.complex(value, torch.randint(-12, 13, tuple(shape), generator=generator).double() / 4)
    elif special:
        chosen = torch.randint(3 * len(SPECIAL), tuple(shape), generator=generator)
        for index, number in enumerate(SPECIAL):
            value[chosen == index] = number
    return value.to(dtype)


def twice(gradient: Tensor) -> Tensor:
    """Return a gradient doubled; programs register it as a hook."""
    return gradient * 2


class Plain:
    """Plain tensors."""

    def leaf(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Placements,
        seed: int,
        grad: bool = False,
        special: bool = False,
    ) -> Tensor:
        """Return a tensor with random values."""
        return leaf_value(shape, dtype, seed, special).requires_grad_(grad)

    def move(self, x: Tensor, placements: Placements) -> Tensor:
        """Return a row-major copy, since redistribution changes no values and gives row-major memory."""
        return x.clone(memory_format=torch.contiguous_format)

    def namespace(self) -> dict[str, object]:
        """Return the names that lines of a program may use."""
        return {
            "torch": torch,
            "F": F,
            "Shard": Shard,
            "Replicate": Replicate,
            "Partial": Partial,
            "InterleavedShard": InterleavedShard,
            "P": P,
            "leaf": self.leaf,
            "move": self.move,
            "twice": twice,
        }


class Distributed(Plain):
    """Distributed tensors on a mesh of the running world. Meshes are reused for all programs of this object."""

    def __init__(self) -> None:
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.mesh: DeviceMesh | None = None

    def use(self, sizes: tuple[int, ...]) -> None:
        """Make leaves on a mesh of these sizes from now on."""
        if sizes not in self.meshes:
            self.meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])
        self.mesh = self.meshes[sizes]

    def leaf(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        placements: Placements,
        seed: int,
        grad: bool = False,
        special: bool = False,
    ) -> Tensor:
        """Return a distributed tensor with the values that the plain side has."""
        assert self.mesh is not None
        value = leaf_value(shape, dtype, seed, special)
        return make_dtensor(value, self.mesh, placements, seed=seed).requires_grad_(grad)

    def move(self, x: Tensor, placements: Placements) -> Tensor:
        """Redistribute a tensor, into new memory."""
        assert isinstance(x, DTensor), f"a {type(x).__name__} is not distributed"
        return x.redistribute(placements=placements).clone(memory_format=torch.contiguous_format)
