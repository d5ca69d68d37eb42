"""Events of collectives: functional ones, and the functions of `torch.distributed`.

Calls with the same group, op, dtype and shape share one description. Walking the stack to the user's line would cost
more than everything else, above all after a wait, when the processor's caches are cold. So each collective stores how
many frames away its lines were: if the frame there is at the same instruction again, it is the same line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from ..._torch.watching import Before
from ...dispatch.arguments import Args, Kwargs
from ...sharding.base import DTensorBase
from ...sharding.mesh import axes_of_group, group_ranks
from ...sharding.source_lines import users_frame
from ...world.registry import active as simulated_worlds
from .journal import Event, Failing, Journal, digest
from .places import line_of
from .stream import Stream

_frame = sys._getframe
_MOST_CALLS = 1 << 12
_MOST_DEPTHS = 8
_MOST_MET = 1 << 16

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "barrier", "all_gather_object"),
    *("broadcast_object_list", "gather_object", "scatter_object_list", "all_gather_coalesced", "all_reduce_coalesced"),
)
"""The functions of `torch.distributed` that all ranks of a group call."""
_SAME_SHAPE = frozenset(("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce"))


class _Collective:
    """The collectives with one group, op, dtype and shape, and the lines that called them."""

    __slots__ = ("append", "number", "places", "stream", "what")

    def __init__(self, number: int, what: str, stream: Stream) -> None:
        self.number, self.what, self.stream, self.append = number, what, stream, stream.append
        self.places: dict[int, dict[int, tuple[CodeType, int]]] = {}
        """How many frames away the user's frame is -> its instruction -> its code and the event."""

    def add_place(self, depth: int, user: FrameType) -> int:
        """Store where a user's frame was, and return the event of the collective that it calls."""
        event = self.number + user.f_lasti + (user.f_code.co_firstlineno << 16)
        if depth not in self.places:
            if len(self.places) >= _MOST_DEPTHS:
                self.places.clear()
            self.places = dict(sorted([*self.places.items(), (depth, {})]))  # the innermost first
        self.places[depth][user.f_lasti] = user.f_code, event
        return event


class CollectiveEvents:
    """Writes the events into a journal, unless something has failed.

    `meet` is called before a collective that is new. It waits until all ranks of the group have reached it: gloo ends
    the process where ranks send different sizes, and the difference could no longer be reported.
    """

    def __init__(self, journal: Journal, failing: Failing, meet: Callable[[Stream], None]) -> None:
        self._journal, self._failing, self._meet = journal, failing, meet
        self._known: list[dict[object, _Collective | None]] = []

    def before_functional(self, op: str) -> Before:
        """Return what to call before a functional collective."""
        name = op.removeprefix("_c10d_functional.").removesuffix(".default")
        same_shape, failing, known = "to_all" not in name, self._failing, self._new_table()
        journal, write = self._journal, self._write

        def before(args: Args, kwargs: Kwargs) -> None:
            if failing.failure is not None:
                failing.check()
            if simulated_worlds:
                return
            try:
                tensor = args[0]
                key = (args[-1], args[1], tensor.dtype, tensor.shape) if same_shape else (args[-1], tensor.dtype)
                found = known[key]
            except (KeyError, IndexError, AttributeError):  # new, or with keywords, or a list of tensors
                found = self._functional(name, args, kwargs)
                if args and not kwargs and type(args[0]) is Tensor:
                    known[key] = found
            if found is None:
                return
            try:
                for depth, places in found.places.items():
                    frame = _frame(depth)
                    place = places.get(frame.f_lasti)
                    if place is not None and place[0] is frame.f_code:
                        journal.last = found.stream
                        found.append(place[1])
                        return
            except ValueError:  # fewer frames than that
                pass
            write(found, _frame(0))

        return before

    def _functional(self, name: str, args: Args, kwargs: Kwargs) -> _Collective | None:
        group = kwargs.get("group_name", args[-1] if args else None)
        tensor = _first_tensor((*args, *kwargs.values()))
        if not isinstance(group, str) or type(tensor) is not Tensor:
            return None
        op = next((value for value in args[:-1] if isinstance(value, str)), kwargs.get("reduce_op", ""))
        return self._described(name, op, group, tensor.dtype, None if "to_all" in name else tensor.shape)

    def before_call(self, name: str, original: Callable[..., object]) -> Before:
        """Return what to call before one of the functions of `torch.distributed`."""
        at = list(inspect.signature(original).parameters).index("group")
        same_shape, failing, known = name in _SAME_SHAPE, self._failing, self._new_table()

        def before(args: Args, kwargs: Kwargs) -> None:
            if failing.failure is not None:
                failing.check()
            group = kwargs.get("group") if len(args) <= at else args[at]
            tensor = args[0] if same_shape and args else None
            key = (group, tensor.dtype, tensor.shape) if type(tensor) is Tensor else group
            try:
                found = known[key]
            except KeyError:
                if same_shape and not args:
                    tensor = _first_tensor(kwargs.values())
                found = self._call(name, group, tensor)
                if not same_shape or args:
                    known[key] = found
            if found is not None:
                self._write(found, _frame(0))

        return before

    def _call(self, name: str, group: object, tensor: object) -> _Collective | None:
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            return None  # a rank that is not in the group: the call does nothing
        of = (tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) and type(tensor) is Tensor else (None, None)
        return self._described(f"dist.{name}", "", group.group_name, *of)

    def forget_groups(self) -> None:
        """Clear the descriptions of all collectives, since a group is about to be destroyed."""
        for known in self._known:
            known.clear()

    def _new_table(self) -> dict[object, _Collective | None]:
        self._known.append({})
        return self._known[-1]

    def _described(
        self, name: str, op: str, group: str, dtype: torch.dtype | None, shape: torch.Size | None
    ) -> _Collective | None:
        if sum(map(len, self._known)) >= _MOST_CALLS:
            self.forget_groups()
        ranks = group_ranks(group)
        if len(ranks) < 2:
            return None
        of = "" if dtype is None else f" of {str(dtype).removeprefix('torch.')}"
        of += "" if shape is None else str(list(shape))
        what = f"{name}{f' ({op})' if op else ''}{of} among ranks {', '.join(map(str, ranks))}"
        return _Collective(digest(what), f"{what}{_over(group)}", self._journal.stream(ranks))

    def _write(self, collective: _Collective, frame: FrameType) -> None:
        """Write the event of a collective; `frame` is that of the function that is called before it."""
        user, depth = users_frame(frame), 0
        while frame is not user and frame.f_back is not None:
            frame, depth = frame.f_back, depth + 1
        event, self._journal.last = collective.add_place(depth, user), collective.stream
        if event in collective.stream.met:
            collective.append(event)
            return
        self._journal.remember(event, Event(collective.what, line_of(user)))
        collective.append(event)
        self._add_met(collective.stream, event)
        self._meet(collective.stream)

    def _add_met(self, stream: Stream, event: int) -> None:
        """Add an event to those that are not new. All ranks of the group clear these at the same event.

        With them go the positions of all collectives, so that every event is looked for here before it is quick again.
        """
        if len(stream.met) >= _MOST_MET:
            stream.met.clear()
            self.forget_groups()
        stream.met.add(event)


def _first_tensor(values: Iterable[object]) -> Tensor | None:
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
