"""Records collectives as they run, each with the op, redistribution or purpose that it is part of.

Ops, redistributions and purposes are contexts on one stack. A collective belongs to the innermost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ..._torch.autograd_graph import next_node_number, node_number
from ..._torch.backward_pass import current_node
from ..._torch.modes import OwnMode, without_modes
from ..._torch.ops import OpOverload
from ..._torch.tls import ThreadValue
from ...comm.cost import cost_model, links_of
from ...comm.groups import ranks_of_group
from ...comm.redistribute import REDISTRIBUTIONS
from ...dispatch.arguments import Args, Kwargs, distributed
from ...dispatch.observe import OPS
from ...ops.collectives import CollectiveOp, collective_of
from ...ops.trivial import computes_nothing
from ...sharding.mesh import MeshInfo, axes_of_group, mesh_of_group, names_text
from ...sharding.source_lines import Line
from ...sharding.spec import DTensorSpec
from ...tensor.dtensor import DTensor
from ..collectives import group_of, public_op, received_bytes, runs_its_own_code
from ..module_calls import ModuleCalls, Moment
from .calls import OpCall, Reasoning, leaves_among
from .lines import line_now, tracking_lines, users_frame_now
from .names import Names
from .purposes import Purpose, reporting_purposes
from .records import Communication
from .timeline import Timeline

_ASKED_FOR = ("redistribute", "full_tensor")


class Redistributing(NamedTuple):
    """A running redistribution."""

    source: DTensorSpec
    target: DTensorSpec


class Found(NamedTuple):
    """The fields of a `Communication` that do not depend on its reason."""

    kind: str
    collective: str
    over: tuple[str, ...]
    group: str
    ranks: int
    bytes: int
    seconds: float


class Recorder(OwnMode):
    """Records the collectives inside `recording`, and the ops between them, of this thread and its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = ModuleCalls()
        self.communications: list[Communication] = []
        self.mesh_axes: dict[str, int] = {}
        self.timeline = Timeline()
        self.reasoning = Reasoning()
        self.names = Names(self.calls)
        self._stack: list[OpCall | Purpose | Redistributing] = []
        self._edits: dict[int, str | None] = {}
        """The edits of ops in the forward pass, by the number of their autograd node."""
        self._groups: dict[str, tuple[tuple[str, ...], Line | None]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside the block."""
        with ExitStack() as stack:
            stack.enter_context(self.calls.track())
            stack.enter_context(tracking_lines())
            stack.enter_context(reporting_purposes(self._inside))
            stack.enter_context(REDISTRIBUTIONS.observing(self._redistribution))
            stack.enter_context(OPS.observing(self._op))
            stack.enter_context(self)
            stack.enter_context(_recorders.changed_to((*_recorders.get(), self)))
            yield

    @contextmanager
    def _inside(self, part: OpCall | Purpose | Redistributing) -> Iterator[None]:
        self._stack.append(part)
        try:
            yield
        finally:
            self._stack.pop()

    def _redistribution(self, source: DTensorSpec, target: DTensorSpec, local: Tensor) -> AbstractContextManager[None]:
        return self._inside(Redistributing(source, target)) if self._is_of_thread() else nullcontext()

    def _op(self, func: OpOverload, args: Args, kwargs: Kwargs) -> AbstractContextManager[None]:
        return self._inside_op(func, args, kwargs) if self._is_of_thread() else nullcontext()

    def _is_of_thread(self) -> bool:
        """Return whether this thread is recorded: observers see the ops of all threads."""
        return any(recorder is self for recorder in _recorders.get())

    @contextmanager
    def _inside_op(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Iterator[None]:
        for leaf in leaves_among(args, kwargs):
            self.names.note_leaf(leaf)
        # Autograd makes the node of an op just before it runs.
        with self._inside(OpCall(func, args, kwargs, next_node_number() - 1)):
            yield

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type[Tensor]],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an op and record it. Tensor subclasses run it by their own code, whose ops this mode records, too."""
        kwargs = kwargs or {}
        if any(runs_its_own_code(kind) for kind in types):
            return NotImplemented
        began = time.perf_counter()
        result = func(*args, **kwargs)
        ended = time.perf_counter()
        op = collective_of(func)
        if op is not None:
            self._communicated(func, op, args, kwargs, result, (began, ended))
        elif not computes_nothing(func) or func.namespace == "_c10d_functional":
            self.timeline.computed(func, args, kwargs, result, (began, ended), self._running_op())
        return result

    def _communicated(
        self,
        func: OpOverload,
        op: CollectiveOp,
        args: Sequence[object],
        kwargs: dict[str, object],
        result: object,
        measured: tuple[float, float],
    ) -> None:
        group = group_of(args, kwargs)
        found = self._found(func, op, group, received_bytes(op, args, kwargs, result))
        with without_modes():  # planning again runs ops on meta tensors
            sent = self._explained(found)
        self.communications.append(sent)
        functional = not op.writes_first
        self.timeline.communicated(sent, ranks_of_group(group), result, measured, waits=functional)

    def _found(self, func: OpOverload, op: CollectiveOp, group: str, received: int) -> Found:
        ranks = ranks_of_group(group)
        mesh = self._mesh(group)
        if mesh is not None:
            mesh_info, axes = mesh
            links, names = links_of(mesh_info), tuple(mesh_info.names[axis] for axis in axes)
            self.mesh_axes |= {mesh_info.names[axis]: mesh_info.sizes[axis] for axis in axes}
        else:
            links, axes, names = cost_model().links_of_group(ranks[0], len(ranks[0]), "cpu"), (0,), ()
        rates = links.p2p if op.received is None else links.ring
        seconds = rates.seconds(axes, len(ranks[0]) - 1, received)
        name = str(public_op(func)).rpartition(".")[2]
        over = names_text(names) if names else axes_of_group(group)
        return Found(op.kind, name, names, over, len(ranks[0]), received, seconds)

    def _mesh(self, group: str) -> tuple[MeshInfo, tuple[int, ...]] | None:
        """Return the mesh and axes of a group. Meshes may share it: that of the present op's tensors comes first."""
        for part in reversed(self._stack):
            specs = [part.source] if isinstance(part, Redistributing) else []
            if isinstance(part, OpCall):
                specs = [tensor._spec for tensor in distributed(part.args, part.kwargs)]
            elif isinstance(part, Purpose):
                specs = [leaf._spec for leaf in part.leaves if isinstance(leaf, DTensor)]
            for mesh_info in (spec.mesh_info for spec in specs):
                axes = next((axes for axes, name in mesh_info.groups.items() if name == group), None)
                if axes is not None:
                    return mesh_info, axes
        return mesh_of_group(group)

    def _explained(self, found: Found) -> Communication:
        moment, line = self.calls.now(), line_now()
        if moment.backward and users_frame_now() is not None:
            moment = replace(moment, recomputing=True)
        redistributing = next((p for p in reversed(self._stack) if isinstance(p, Redistributing)), None)
        reason = self._reason()
        if isinstance(reason, Purpose) and reason.leaves:
            first = reason.leaves[0]
            line = self.names.line_of_leaf(first) or reason.line or line
            moment = Moment(self.calls.owners(first), True, False)
        elif isinstance(reason, Purpose) and reason.cause in ("gather parameters", "reduce gradients"):
            moment, line = self._of_group(reason.detail, moment, line)
        sent = Communication(
            number=len(self.communications) + 1,
            **found._asdict(),
            backward=moment.backward,
            recomputing=moment.recomputing,
            modules=moment.modules,
            line=line,
            cause="program",
            before=repr(redistributing.source) if redistributing else None,
            after=repr(redistributing.target) if redistributing else None,
        )
        pair = (redistributing.source, redistributing.target) if redistributing else None
        if not isinstance(reason, OpCall):
            return self.reasoning.of_purpose(sent, reason, pair, self.names)
        sent = self.reasoning.of_call(sent, reason, pair, self.names)
        if not sent.backward or sent.recomputing:
            self._edits[reason.node] = sent.edit
            return sent
        # A derivative formula has no line to edit. The edit that avoids the communication of its op is shown.
        node = current_node()
        return replace(sent, edit=self._edits.get(node_number(node)) if node is not None else None)

    def _of_group(self, name: str, moment: Moment, line: Line | None) -> tuple[Moment, Line | None]:
        """Return modules and line of a group of `fully_shard`: in backward those of its gather in the forward pass."""
        if not moment.backward:
            self._groups[name] = moment.modules, line
        modules, line = self._groups.get(name, (moment.modules, line))
        return Moment(modules, moment.backward, moment.recomputing), line

    def _reason(self) -> OpCall | Purpose | None:
        """Return the innermost op or purpose; but for a `redistribute` inside an op or style, that op or style."""
        parts = [part for part in reversed(self._stack) if not isinstance(part, Redistributing)]
        mine = (part for part in parts if not isinstance(part, Purpose) or part.cause not in _ASKED_FOR)
        return next(mine, parts[0] if parts else None)

    def _running_op(self) -> str:
        """Return the running op on distributed tensors; "" outside of one."""
        call = next((part for part in reversed(self._stack) if isinstance(part, OpCall)), None)
        return str(call.func).removesuffix(".default") if call is not None else ""


_recorders: ThreadValue[tuple[Recorder, ...]] = ThreadValue("recorders", ())
"""The recorders of this thread, and of its backward passes."""
