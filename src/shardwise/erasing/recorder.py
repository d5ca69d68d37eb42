"""Record the ops on local tensors while a function runs, as a graph.

The recorder is a dispatch mode. It leaves ops on distributed tensors to their class, whose ops on local shards come
back to it. These, and ops on plain tensors, it runs and records. So a recording is what one rank computes and
communicates. In a simulated world a local tensor is a RankTensor, and the recording is that of all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.collectives import WAIT
from .._torch.modes import OwnMode
from .._torch.ops import OpOverload
from ..errors import EraseError
from ..ops.call import Args, Kwargs
from ..ops.recorded import READING_METHODS, READS_VALUES
from ..ops.resolve import NEEDS_DATA
from ..sharding.base import DTensorBase
from ..sharding.recording import recorder as active_recorder
from ..sharding.source_lines import in_mesh_code, users_line
from ..sharding.spec import DTensorSpec
from ..world import RankTensor
from .random_states import RandomStates

T = TypeVar("T")


class Meta(NamedTuple):
    """The metadata of a tensor in a graph."""

    shape: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        return Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """The bytes of a contiguous tensor of this shape. Sizes that differ between simulated ranks count as 1."""
        count = 1
        for size in self.shape:
            count *= int(size) if isinstance(size, int) else 1
        return count * self.dtype.itemsize


class Constant:
    """An argument that differs between simulated ranks, wrapped because a graph does not take it directly."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class OpRecorder(OwnMode):
    """Records the ops of a function in `graph`."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.state: dict[fx.Node, Tensor] = {}
        """The tensors that exist before the call and are not arguments: parameters, buffers, constants."""
        self.owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """By local shard, the distributed tensors whose local shard was not made by an op of the recording."""
        self.first_grads: dict[int, Tensor | None] = {}
        """By the id of a leaf, its gradient when the leaf was first seen."""
        self.paused = 0
        self.random = RandomStates(self)
        self._nodes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._shards: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._last_input: fx.Node | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the ops of this thread and of its backward passes inside the block."""
        with active_recorder.changed_to(self), self, _RefuseReads(self):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run ops inside the block without recording them."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    # ---- tensors and nodes ------------------------------------------------------------------------------------------

    def input(self, tensor: Tensor, name: str) -> fx.Node:
        """Add a placeholder for a tensor that differs from call to call."""
        node = self._placeholder(name)
        self.bind(tensor, node)
        return node

    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """Record that a tensor is the value of a node."""
        self._nodes[tensor] = node
        node.meta["tensor"] = Meta.of(tensor)
        if isinstance(tensor, RankTensor):
            for rank, shard in enumerate(tensor.shards):
                self._shards[shard] = (node, rank)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor. A tensor that no op has made becomes state."""
        node = self.known(tensor)
        return self._state_node(tensor) if node is None else node

    def known(self, tensor: Tensor) -> fx.Node | None:
        """Return the node of a tensor; None for a tensor that the recording has not seen."""
        node: fx.Node | None = self._nodes.get(tensor)
        if node is not None:
            return node
        if tensor in self.owners:
            return None
        if isinstance(tensor, RankTensor):
            parts = [self.known(shard) for shard in tensor.shards]
            if all(part is not None for part in parts):
                return self._make(tensor, RankTensor, (parts,))
        elif tensor in self._shards:
            source, rank = self._shards[tensor]
            if isinstance(source, Tensor):
                source = self._nodes.get(source) or self._state_node(source)
            return self._make(tensor, shard_of, (source, rank))
        return None

    def made(self) -> list[tuple[Tensor, fx.Node]]:
        """Return the tensors made by nodes of the recording that are still alive, with their nodes."""
        return [(tensor, node) for tensor, node in self._nodes.items() if node.op == "call_function"]

    def _make(self, tensor: Tensor, target: Callable[..., object], args: Args) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["pure"] = True  # takes an element of its arguments, or combines them
        self.bind(tensor, node)
        return node

    def _state_node(self, tensor: Tensor) -> fx.Node:
        node = self._placeholder("state")
        self.state[node] = tensor
        self.bind(tensor, node)
        return node

    def _placeholder(self, name: str) -> fx.Node:
        """Add a placeholder after the others, and before all ops."""
        before = self._last_input.next if self._last_input is not None else next(iter(self.graph.nodes), None)
        if before is None or before.op == "root":
            node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_before(before):
                node = self.graph.placeholder(name)
        self._last_input = node
        return node

    # ---- ops --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensorBase) for kind in types):
            self._note_owners((args, kwargs))
            return NotImplemented
        if self.paused:
            return func(*args, **kwargs)
        if func in READS_VALUES or NEEDS_DATA & set(func.tags):
            refuse_read(str(func))
            return func(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            self.random.before_draw()
        result = func(*args, **kwargs)
        node = self._write(_waited(func) if func.namespace == "c10d" else func, args, kwargs, result)
        if draws:
            self.random.after_draw(node)
        return result

    def call(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        """Run a function of tensors and constants, and record it as one op."""
        if self.paused:
            return fn(*args)
        self.random.before_draw()
        with self.pause():
            result = fn(*args)
        node = self._write(fn, args, {}, result)
        node.meta["local"] = True  # writes at most its arguments
        self.random.after_draw(node)
        return result

    def step(self, fn: Callable[..., object], *args: object) -> fx.Node:
        """Record, without making it, a call that each replay makes, and that returns nothing."""
        return self._write(fn, args, {}, None)

    def _write(self, target: Callable[..., object], args: Args, kwargs: Kwargs, result: object) -> fx.Node:
        given, named = self._as_nodes(list(args)), {name: self._as_nodes(value) for name, value in kwargs.items()}
        node = self.graph.call_function(target, tuple(given), named)
        node.meta["line"] = users_line()
        if isinstance(result, Tensor):
            # An op in place returns its argument, whose node stays. So does a wait, but only its result may be read.
            if self._nodes.get(result) is None or target is WAIT:
                self.bind(result, node)
            node.meta["tensor"] = Meta.of(result)
        elif isinstance(result, (list, tuple)):
            for index, element in enumerate(result):
                if isinstance(element, Tensor) and self._nodes.get(element) is None:
                    self._make(element, operator.getitem, (node, index))
        return node

    def _as_nodes(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, dict):
            return {name: self._as_nodes(element) for name, element in value.items()}
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)([self._as_nodes(element) for element in value])
        if isinstance(value, torch.Size):
            return [self._as_nodes(size) for size in value]
        return Constant(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value

    def _note_owners(self, value: object) -> None:
        if isinstance(value, DTensorBase):
            local = value._shard if value._source is None else None
            if local is not None and local not in self.owners and self.known(local) is None:
                self.owners[local] = value
                for rank, shard in enumerate(local.shards if isinstance(local, RankTensor) else ()):
                    self._shards[shard] = (local, rank)  # code that runs rank by rank may use the shards first
                if value.requires_grad and value.is_leaf:
                    self.first_grads[id(value)] = value.grad
        elif isinstance(value, dict):
            self._note_owners(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for element in value:
                self._note_owners(element)


class _RefuseReads(TorchFunctionMode):
    """Raises an error for methods that read a tensor's data without an op."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Callable[..., object], types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in READING_METHODS and not self._recorder.paused:
            refuse_read(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def refuse_read(what: str) -> None:
    """Raise an error: Python code reads the data of a tensor. The library's own code may do so."""
    if in_mesh_code():
        return
    raise EraseError(
        f"{users_line()}: {what} reads a tensor while the step is recorded; a replay would repeat the value it has now",
        "return the tensor and read it after the step, or write the choice with tensors: torch.where(condition, a, b)",
    )


def _waited(func: OpOverload) -> Callable[..., object]:
    """Return a collective of `torch.distributed` that waits for its handle, since that wait is not an op."""

    def run(*args: object, **kwargs: object) -> object:
        *results, work = func(*args, **kwargs)
        work.wait()
        return results

    run.__name__ = func.__name__
    return run


def shard_of(tensor: RankTensor, rank: int) -> Tensor:
    """Return one rank's shard in a simulated world."""
    return tensor.shards[rank]


def local_of(value: T) -> T | Tensor:
    """Return the local shard of a distributed tensor, and any other value unchanged."""
    return value._local_shard if isinstance(value, DTensorBase) else value


def spec_of(value: object) -> DTensorSpec | None:
    """Return the spec of a distributed tensor; None for any other value."""
    return value._spec if isinstance(value, DTensorBase) else None
