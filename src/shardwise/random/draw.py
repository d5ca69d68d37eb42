"""What one call draws from: the whole tensor by PyTorch itself, or a key and the indices of the elements held.

Small tensors are drawn whole on every rank, from the user's generator, and each rank keeps its part: they are those of
plain torch, at less than the cost of an algorithm. Which tensors are small depends on their global size alone. Larger
ones take one key from the generator, and every rank makes its own elements. Inside `exact()` all are drawn whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm.local_moves import take_slice
from ..errors import InputError
from ..sharding.layout import Coordinate, Factor, Layout
from ..sharding.mesh import MeshInfo
from ..sharding.spec import TensorMeta
from ..world.mapping import generator_for
from .agreement import check_first_use
from .bits import Key, mixed
from .box import box_of
from .fill import fill

WHOLE_UP_TO = 1 << 16
"""Elements of the whole tensor up to which it is drawn whole."""


class _Exact:
    """The switch. One for the process: recomputed activations are drawn in autograd's threads."""

    on = False


@contextmanager
def exact(enabled: bool = True) -> Iterator[None]:
    """Inside, everything is drawn whole and cut: on a CPU bit by bit what plain torch draws on one device.

    Costs the time and memory of the whole tensor on every rank. Backward passes belong inside, too, where activations
    are recomputed.
    """
    before, _Exact.on = _Exact.on, enabled
    try:
        yield
    finally:
        _Exact.on = before


def is_exact() -> bool:
    """Whether everything is drawn whole."""
    return _Exact.on


class Draw:
    """The numbers of one call on a tensor of this global shape, stride and dtype; the first use moves the generator."""

    __slots__ = ("_device", "_generator", "_key", "_made", "_meta", "_whole")

    def __init__(
        self, mesh_info: MeshInfo, meta: TensorMeta, device: torch.device, generator: torch.Generator | None
    ) -> None:
        self._meta, self._device = meta, device
        self._key: Key | None = None
        self._made: Tensor | None = None
        self._whole = Layout.make(mesh_info.sizes, tuple((Factor(size, ()),) for size in meta.shape))
        if device.type == "meta":
            return
        self._generator = generator = generator_for((generator,), device)
        if generator.device.type not in ("cpu", device.type):
            raise InputError(
                f"a generator on {generator.device} for numbers on {device}",
                "use one of that device, or one of the CPU",
            )
        check_first_use(mesh_info, generator)

    def numbers(
        self,
        layout: Layout,
        at: Coordinate,
        name: str,
        arguments: tuple[Any, ...],
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """What the in-place op of this name writes, the part of the rank at this coordinate; into `out` if it fits."""
        dtype = self._meta.dtype if dtype is None else dtype
        if self._device.type == "meta":
            return torch.empty(layout.local_shape(at), dtype=dtype, device="meta")
        key = None if name == "randperm" else self.key  # a permutation is one draw
        if key is None:
            return take_slice(self._drawn_whole(name, arguments, dtype), self._whole, layout, at).to(self._device)
        fits = out is not None and out.is_contiguous() and out.dtype == dtype
        local = out if fits else torch.empty(layout.local_shape(at), dtype=dtype, device=self._device)
        assert local is not None
        return fill(local, box_of(layout, at), key, name, arguments)

    @property
    def key(self) -> Key | None:
        """The key; None where the whole is drawn."""
        if self._key is None and not _Exact.on and self._meta.shape.numel() > WHOLE_UP_TO:
            self._key = draw_key(self._generator)
        return self._key

    def _drawn_whole(self, name: str, arguments: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        if self._made is None:  # once for all ranks of a simulated world
            shape, stride = self._meta.shape, self._meta.stride
            empty = torch.empty_strided(shape, stride, dtype=dtype, device=self._generator.device)
            if name == "native_dropout":
                ones = torch.ones_like(empty, dtype=self._meta.dtype)
                self._made = torch.native_dropout(ones, arguments[0], True)[1]
            elif name == "randperm":
                self._made = torch.randperm(shape[0], generator=self._generator, out=empty)
            else:
                self._made = getattr(empty, name)(*arguments, generator=self._generator)
        return self._made


def draw_key(generator: torch.Generator) -> Key:
    """A key from this generator, which moves on by as much whatever the key is for."""
    device = generator.device
    if torch.compiler.is_compiling():
        return Key(*torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device).unbind())
    if device.type == "cpu":
        return Key(*torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator).tolist())
    if torch.cuda.is_current_stream_capturing():
        raise InputError(
            "random numbers by index inside the capture of a CUDA graph",
            "draw them outside: a replay would repeat them",
        )
    # No question to the device: where its generator stands is known on the host.
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)
    return Key(mixed(seed, offset, 0), mixed(seed, offset, 1))
