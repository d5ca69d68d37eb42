"""One call that draws random numbers: PyTorch draws the global tensor, or every rank computes its shard from a key.

A small tensor is drawn by PyTorch on every rank, from the user's generator, and each rank keeps its shard. Its numbers
are those of plain torch, and cost less than numbers by index. Whether a tensor is small depends only on its global
size. For a larger one, the call draws one key from the generator, and every rank computes the elements it holds. Inside
`exact()` every tensor is drawn by PyTorch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .._torch.fake_tensors import in_fake_mode, is_recorded
from .._torch.tls import ThreadValue
from ..comm.local_moves import take_slice
from ..errors import InputError
from ..sharding.layout import Coordinate, Factor, Layout
from ..sharding.mesh import MeshInfo
from ..sharding.observers import Observers
from ..sharding.spec import TensorMeta
from ..world.generators import generator_for
from .agreement import check_first_use
from .bits import Key, mixed
from .box import box_of
from .fill import Arguments, fill

GLOBAL_DRAW_LIMIT = 1 << 16
"""Tensors of up to this many elements are drawn by PyTorch, as the global tensor on every rank."""

_exact = ThreadValue("random.exact", False)


@contextmanager
def exact(enabled: bool = True) -> Iterator[None]:
    """Draw every tensor as the global tensor: on a CPU, the numbers that plain torch draws on one device.

    Each draw inside takes the time and memory of the global tensor on every rank. Where activations are recomputed,
    call backward inside, too. It holds for this thread and for the backward passes that it starts.

    >>> generator = torch.manual_seed(0)
    >>> with exact():
    ...     x = shardwise.randn(1000, 1000, device_mesh=mesh, placements=P("dp"))
    >>> generator = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), torch.randn(1000, 1000))
    True
    """
    with _exact.changed_to(enabled):
        yield


def is_exact() -> bool:
    """Return whether this thread is inside `exact()`.

    >>> with exact():
    ...     is_exact()
    True
    """
    return _exact.get()


DRAWS: Observers[[MeshInfo, torch.Generator], None] = Observers()
"""Observers of draws of random numbers in processes, called before the generator is used."""


def _check_and_notify(mesh_info: MeshInfo, generator: torch.Generator) -> None:
    check_first_use(mesh_info, generator)
    DRAWS.notify(mesh_info, generator)


_before_draw: Callable[[MeshInfo, torch.Generator], None] = check_first_use


@DRAWS.on_change
def _swap() -> None:
    global _before_draw
    _before_draw = _check_and_notify if DRAWS.present else check_first_use


class Draw:
    """The numbers of one call, for a tensor of this global shape, stride and dtype. Using it advances the generator."""

    __slots__ = ("_device", "_drawn_on", "_generator", "_global", "_has_data", "_key", "_meta", "_replicated")

    def __init__(
        self, mesh_info: MeshInfo, meta: TensorMeta, device: torch.device, generator: torch.Generator | None
    ) -> None:
        self._generator: torch.Generator | None
        self._meta, self._device = meta, device
        self._key: Key | None = None
        self._global: Tensor | None = None
        self._replicated = Layout.make(mesh_info.sizes, tuple((Factor(size, ()),) for size in meta.shape))
        recorded = is_recorded()
        self._has_data = device.type != "meta" and (recorded or not in_fake_mode())
        if not self._has_data:
            return
        if recorded and generator is None:
            # A graph draws from the default generator of the device on which it draws.
            self._generator, self._drawn_on = None, device
            return
        self._generator = generator = generator_for((generator,), device)
        self._drawn_on = generator.device
        if generator.device.type not in ("cpu", device.type):
            raise InputError(
                f"got a generator on {generator.device} to draw numbers on {device}",
                f"pass torch.Generator({device.type!r}), or one on the CPU",
            )
        if not recorded:
            _before_draw(mesh_info, generator)

    def numbers(
        self,
        layout: Layout,
        at: Coordinate,
        name: str,
        arguments: Arguments,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return what an in-place op writes to the shard of the rank at this coordinate, in `out` if that fits."""
        dtype = self._meta.dtype if dtype is None else dtype
        if not self._has_data:
            return torch.empty(layout.local_shape(at), dtype=dtype, device=self._device)
        key = None if name == "randperm" else self.key  # no element of a permutation can be drawn alone
        if key is None:
            return take_slice(self._draw_global(name, arguments, dtype), self._replicated, layout, at).to(self._device)
        fits = out is not None and out.is_contiguous() and out.dtype == dtype
        local = out if fits else torch.empty(layout.local_shape(at), dtype=dtype, device=self._device)
        assert local is not None
        return fill(local, box_of(layout, at), key, name, arguments)

    @property
    def key(self) -> Key | None:
        """The key from which elements are computed by index; None where the global tensor is drawn."""
        if self._key is None and self._has_data and not is_exact() and math.prod(self._meta.shape) > GLOBAL_DRAW_LIMIT:
            self._key = draw_key(self._generator, self._drawn_on)
        return self._key

    def _draw_global(self, name: str, arguments: Arguments, dtype: torch.dtype) -> Tensor:
        """Draw the global tensor: once, for all ranks of a simulated world."""
        if self._global is None:
            shape, stride = self._meta.shape, self._meta.stride
            empty = torch.empty_strided(shape, stride, dtype=dtype, device=self._drawn_on)
            if name == "native_dropout":
                ones = torch.ones_like(empty, dtype=self._meta.dtype)
                self._global = torch.native_dropout(ones, arguments[0], True)[1]
            elif name == "randperm":
                self._global = torch.randperm(shape[0], generator=self._generator, out=empty)
            else:
                self._global = getattr(empty, name)(*arguments, generator=self._generator)
        return self._global


_moving_offset = threading.Lock()  # two threads that read one offset would draw the same key


def draw_key(generator: torch.Generator | None, device: torch.device) -> Key:
    """Draw a key from a generator on this device, None for the default one of a graph that is being recorded.

    It advances by the same amount for every key.
    """
    if generator is None or is_recorded():
        return Key(*torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device).unbind())
    if device.type == "cpu":
        return Key(*torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator).tolist())
    if torch.cuda.is_current_stream_capturing():
        raise InputError(
            "random numbers by index inside the capture of a CUDA graph",
            "draw them before the capture: a replay of the graph would repeat the same numbers",
        )
    # Seed and offset are known on the host: this does not wait for the device.
    with _moving_offset:
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + 4)
    return Key(mixed(seed, offset, 0), mixed(seed, offset, 1))
