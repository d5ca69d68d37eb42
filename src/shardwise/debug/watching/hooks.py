"""Where events come from: ops on distributed tensors, local tensors that become such, collectives, random numbers.

Nothing of this is in place unless a watch runs; the hot path then looks calls up through a function of ours.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch.ops import OpOverload
from ..._torch.watching import functional_collectives, wrap_op
from ...dispatch.hot_path import Ready, observe_calls
from ...ops.trivial import computes_nothing
from ...random.draw import observe_draws
from ...sharding.base import DTensorBase
from ...sharding.mesh import MeshInfo, axes_of_group, group_ranks
from ...sharding.spec import DTensorSpec
from ...tensor.from_local import observe_local_tensors
from ...world import current_world
from .journal import Journal, digest
from .stream import Stream

_frame = sys._getframe
_MOST_CALLS = 1 << 14

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "barrier", "all_gather_object"),
    *("broadcast_object_list", "gather_object", "scatter_object_list", "all_gather_coalesced", "all_reduce_coalesced"),
)
"""The functions of `torch.distributed` that all ranks of a group call."""
_SAME_SHAPE = frozenset(("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce"))


class Hooks:
    """Writes what this rank does into a journal, from `install` to `remove`."""

    def __init__(self, journal: Journal, ops: bool = True) -> None:
        self.journal, self.ops = journal, ops
        self._before_end: Callable[[], None] = lambda: None
        self._meet: Callable[[Stream], None] = lambda stream: None
        self._on, self._changing = False, threading.Lock()
        self.failure: Callable[[], BaseException] | None = None
        """Once set, whatever would be an event raises this."""
        self._undo: list[Callable[[], object]] = []
        self._words: dict[int, str] = {}
        self._made: dict[DTensorSpec, tuple[int, str]] = {}
        self._collectives: dict[object, tuple[int, str]] = {}
        self._groups: dict[str, tuple[int, ...]] = {}

    def observe_ops(self) -> None:
        """Write down ops, if this was asked for."""
        if self.ops:
            observe_calls(self._observe_calls)
            observe_local_tensors(self._local_tensor)

    @staticmethod
    def ignore_ops() -> None:
        """Stop writing down ops. What communicates is still an event."""
        observe_calls(None)
        observe_local_tensors(None)

    def install(self, before_end: Callable[[], None], meet: Callable[[Stream], None]) -> None:
        """Begin to write. One function is called before the program destroys its process groups.

        The other is called before a collective that is met first. It waits until all ranks of the group have come to
        it: gloo ends the process where ranks send different sizes, and it would be too late to say why.
        """
        self._before_end, self._on, self._meet = before_end, True, meet
        self.observe_ops()
        observe_draws(self._draw)
        for op in functional_collectives():
            self._undo.append(wrap_op(op, _named(self._collective, str(op))))
        for name in COLLECTIVES:
            self._replace(name, self._call)
        self._replace("new_group", self._new_group)
        self._replace("destroy_process_group", self._destroy)

    def remove(self) -> None:
        """Stop writing. Modules that were imported meanwhile may keep functions of ours, which do nothing now."""
        with self._changing:
            self._on, self.failure = False, None
            self.ignore_ops()
        observe_draws(None)
        while self._undo:
            self._undo.pop()()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """From now on raise this at each event."""
        with self._changing:
            if self._on:
                self.failure = failure
                if self.ops:
                    observe_calls(lambda look_up: self._refuse)

    def _refuse(self, key: object) -> None:
        self._check()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure()

    # ---- ops ------------------------------------------------------------------------------------------------------

    def _observe_calls(self, look_up: Callable[[Any], Ready | None]) -> Callable[[Any], Ready | None]:
        journal = self.journal
        calls, events = dict[Any, tuple[int, Callable[[int], None]] | None](), dict[int, int]()
        known: Callable[[Any, Any], Any] = calls.get
        event_at = events.get
        unknown = object()

        def observed(key: Any) -> Ready | None:
            found = known(key, unknown)
            if found is unknown:
                if len(calls) >= _MOST_CALLS:
                    calls.clear()
                    events.clear()
                found = calls[key] = self._describe_call(key, _frame(1))
            if found is not None:
                number, append = found
                caller = _frame(2)
                place = number + caller.f_lasti + (caller.f_code.co_firstlineno << 16)
                event = event_at(place)
                if event is None:
                    event = events[place] = journal.place_of_call(number, self._words[number], caller)
                append(event)
            return look_up(key)

        return observed

    def _describe_call(self, key: Any, frame: FrameType) -> tuple[int, Callable[[int], None]] | None:
        """The digest and the stream of a call that is met first; None if it is no event."""
        func, spec = frame.f_locals["func"], _first_spec(key)
        if spec is None or not _is_compared(spec.mesh_info) or _is_free(func):
            return None
        what = f"{func}({', '.join(_text(part) for part in key[1:])}) on {spec.mesh_info!r}"
        number = digest(f"{what} {_strides(key)}")
        self._words[number] = what
        return number, self.journal.stream(spec.mesh_info.ranks).append

    def _local_tensor(self, spec: DTensorSpec) -> None:
        """A local tensor becomes a distributed one: the ranks must mean the same global tensor."""
        self._check()
        if _is_compared(spec.mesh_info):
            what = self._made.get(spec)
            if what is None:
                text = f"make {spec!r} from local tensors on {spec.mesh_info!r}"
                what = self._made[spec] = digest(text), text
            self.journal.stream(spec.mesh_info.ranks).append(self.journal.place(*what, _frame(1)))

    # ---- collectives ----------------------------------------------------------------------------------------------

    def _collective(self, name: str, *args: object, **kwargs: object) -> None:
        """A functional collective is about to run."""
        self._check()
        if current_world() is not None:
            return
        group = kwargs.get("group_name", args[-1])
        tensor = _first_tensor(args)
        if isinstance(group, str) and type(tensor) is Tensor:
            op = next((value for value in args[:-1] if isinstance(value, str)), "")
            self._write(name, op, group, tensor.dtype, None if "to_all" in name else tensor.shape)

    def _write(
        self, name: str, op: str, group: str, dtype: torch.dtype | None = None, shape: torch.Size | None = None
    ) -> None:
        ranks = self._groups.get(group)
        if ranks is None:
            ranks = self._groups[group] = group_ranks(group)
        if len(ranks) < 2:
            return
        key = name, op, group, dtype, shape
        found = self._collectives.get(key)
        if found is None:
            of = "" if dtype is None else f" of {str(dtype).removeprefix('torch.')}"
            of += "" if shape is None else str(list(shape))
            what = f"{name}{f' ({op})' if op else ''}{of} among ranks {', '.join(map(str, ranks))}"
            found = self._collectives[key] = digest(what), f"{what}{_over(group)}"
        stream = self.journal.last = self.journal.stream(ranks)
        event = self.journal.place(*found, _frame(2))
        stream.append(event)
        if event not in stream.met:
            stream.met.add(event)
            self._meet(stream)

    def _replace(self, name: str, write: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Put a function that writes an event in the place of one of `torch.distributed`."""
        original = getattr(dist, name, None)
        if original is None:
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._on and current_world() is None and dist.is_initialized():
                write(name, args, kwargs)
            return original(*args, **kwargs)

        watched.__name__, watched.__wrapped__ = name, original  # type: ignore[attr-defined]
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, watched)

        def undo() -> None:
            for module in (dist, dist.distributed_c10d):
                if getattr(module, name) is watched:
                    setattr(module, name, original)

        self._undo.append(undo)

    def _call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._check()
        group = next((v for v in (*args, *kwargs.values()) if isinstance(v, dist.ProcessGroup)), dist.group.WORLD)
        if group is None or dist.get_rank(group) < 0:
            return
        tensor = _first_tensor((*args, *kwargs.values())) if name in _SAME_SHAPE else None
        of = (tensor.dtype, tensor.shape) if type(tensor) is Tensor else ()
        self._write(f"dist.{name}", "", group.group_name, *of)

    def _new_group(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._check()
        if kwargs.get("use_local_synchronization"):
            return
        ranks: Any = args[0] if args else kwargs.get("ranks")
        what = f"dist.new_group({'' if ranks is None else list(ranks)})"
        self.journal.stream(tuple(range(dist.get_world_size()))).append(
            self.journal.place(digest(what), what, _frame(2))
        )

    def _destroy(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        group = args[0] if args else kwargs.get("group")
        if (group is None or group is dist.group.WORLD) and self.failure is None:
            self._before_end()

    # ---- random numbers -------------------------------------------------------------------------------------------

    def _draw(self, mesh_info: MeshInfo, generator: torch.Generator) -> None:
        """Numbers are about to be drawn for a distributed tensor: the generators must be in the same state."""
        self._check()
        if not _is_compared(mesh_info):
            return
        state = digest(generator_state(generator).hex())
        what = f"draw random numbers on {mesh_info!r}, the generator in state {state:x}"
        event = self.journal.place(state, what, _frame(1))
        self.journal.stream(mesh_info.ranks).append(event)


def generator_state(generator: torch.Generator) -> bytes:
    """What tells the states of a generator apart: seed and position, and on a CPU the first of its words."""
    if generator.device.type == "cpu":
        return generator.get_state().numpy()[:96].tobytes()
    return f"{generator.initial_seed()} {generator.get_offset()}".encode()


def _named(call: Callable[..., None], op: str) -> Callable[..., None]:
    name = op.removeprefix("_c10d_functional.").removesuffix(".default")

    def before(*args: object, **kwargs: object) -> None:
        call(name, *args, **kwargs)

    return before


def _is_compared(mesh_info: MeshInfo) -> bool:
    return not mesh_info.simulated and not mesh_info.outside and len(mesh_info.ranks) > 1


def _is_free(func: OpOverload) -> bool:
    """Whether one rank may call an op alone, for a log: views, and what reads a number; that may communicate."""
    return computes_nothing(func) or not any("Tensor" in str(result.type) for result in func._schema.returns)


def _first_spec(key: Any) -> DTensorSpec | None:
    for part in key:
        if isinstance(part, DTensorSpec):
            return part
        if isinstance(part, tuple) and (found := _first_spec(part)) is not None:
            return found
    return None


def _text(part: object) -> str:
    """A part of the key of a call, in words that are the same on all ranks."""
    if isinstance(part, tuple):
        if len(part) == 2 and part[0] is bool:
            return repr(part[1])
        return f"[{', '.join(map(_text, part))}]"
    if isinstance(part, type):
        return part.__name__
    if isinstance(part, (DTensorSpec, int, str, float, complex, type(None), torch.Size)):
        return repr(part)
    if isinstance(part, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(part)
    return type(part).__name__


def _strides(key: Any) -> str:
    return " ".join(str(tuple(part.stride)) for part in key if isinstance(part, DTensorSpec))


def _first_tensor(values: Any) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return None if isinstance(value, DTensorBase) else value
        if isinstance(value, (list, tuple)) and (found := _first_tensor(value)) is not None:
            return found
    return None


def _over(group: str) -> str:
    try:
        axes = axes_of_group(group)
    except (RuntimeError, LookupError, ValueError, AssertionError):
        return ""
    return f" (over {axes})" if axes else ""
