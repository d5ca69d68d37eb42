"""What most tests here want: a simulated world with one mesh over all its ranks, and a look at what it communicates."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import DeviceMesh, init_device_mesh, simulate

NAMES = ("a", "b", "c", "d")


@contextmanager
def mesh_of(*sizes: int, names: Sequence[str] = NAMES) -> Iterator[DeviceMesh]:
    with simulate(math.prod(sizes)):
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names[: len(sizes)]))


@contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """One rank of a process group that moves nothing."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def lone_rank() -> Iterator[DeviceMesh]:
    """One rank of four, with a process group that moves nothing: enough for comparing with PyTorch and for counting."""
    with fake_group(4):
        yield init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


class Recorder(TorchDispatchMode):
    """Records what is communicated: the collective's name and the dtype of what it carries."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional":
            first = args[0][0] if isinstance(args[0], list) else args[0]
            self.calls.append((func._schema.name.removeprefix("_c10d_functional::"), first.dtype))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [name for name, _ in self.calls]

    @property
    def dtypes(self):
        return {dtype for _, dtype in self.calls}
