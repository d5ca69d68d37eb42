"""CommDebugMode: count and print the communication of a program, module by module.

>>> comm = CommDebugMode()
>>> with comm:
...     model(x).sum().backward()
>>> comm.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
2
>>> print(comm.generate_comm_debug_tracing_table(noise_level=0))
┌──────────┬──────────────────────────────────┬──────────────────────────────────┐
│ module   │ forward                          │ backward                         │
├──────────┼──────────────────────────────────┼──────────────────────────────────┤
│ Global   │   1 all-reduce over tp     192 B │   1 all-reduce over tp     192 B │
│   MLP    │   1 all-reduce over tp     192 B │   1 all-reduce over tp     192 B │
│     up   │                                  │   1 all-reduce over tp     192 B │
│     down │   1 all-reduce over tp     192 B │                                  │
└──────────┴──────────────────────────────────┴──────────────────────────────────┘

It works on processes and on simulated ranks. A collective of simulated ranks counts once. Messages from rank to rank,
such as those between the stages of a pipeline, count as `send` and `receive`: a process counts its own, a simulated
world those of all stages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from .._torch import pytree
from .._torch.modes import OwnMode
from .._torch.ops import OpOverload
from ..ops.collectives import RECEIVE, SEND, CollectiveOp, collective_of
from ..pipeline.transfer import is_of_backward
from ..sharding.mesh import axes_of_group
from ..sharding.placement import Placement
from ..tensor.dtensor import DTensor
from .collectives import group_of, public_op, received_bytes, runs_its_own_code
from .comm_record import Collective, ModuleRecord, OpCounts, Operation, counts, received
from .comm_table import draw_table, json_tree, list_modules
from .module_calls import ROOT, ModuleCalls


class CommDebugMode(OwnMode):
    """Counts the collectives inside its `with` block, and the bytes that a rank receives in them.

    Entering it again resets the counts. The counts of a module include those of its submodules. A collective of the
    backward pass counts for the module whose forward pass made the autograd node that runs it.

    >>> comm = CommDebugMode()
    >>> with comm:
    ...     y = x.redistribute(placements=P())
    >>> comm.get_total_counts(), comm.get_total_bytes()
    (1, 96)
    """

    def __init__(self) -> None:
        super().__init__()
        self._reset()

    def _reset(self) -> None:
        self._calls = ModuleCalls()
        self.collectives: list[Collective] = []
        self.operations: list[Operation | Collective] = []

    def __enter__(self) -> CommDebugMode:
        self._reset()
        self._tracking = ExitStack()
        self._tracking.enter_context(self._calls.track())
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._tracking.close()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type[Tensor]],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Record an op and run it. Tensor subclasses run it by their own code, whose ops this mode records, too."""
        kwargs = kwargs or {}
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        inputs = tuple((tuple(t.shape), t._spec if isinstance(t, DTensor) else None) for t in tensors)
        self.operations.append(Operation(func, inputs, self._calls.now()))
        if any(runs_its_own_code(kind) for kind in types):
            return NotImplemented
        result = func(*args, **kwargs)  # on all simulated ranks at once: the ops of each rank are not recorded
        op = collective_of(func)
        if op is not None:
            self._count(func, op, args, kwargs, result)
        return result

    def _count(
        self, func: OpOverload, op: CollectiveOp, args: Sequence[object], kwargs: dict[str, object], result: object
    ) -> None:
        over = axes_of_group(group_of(args, kwargs))
        nbytes = received_bytes(op, args, kwargs, result)
        moment = self._calls.now()
        if op in (SEND, RECEIVE) and is_of_backward(_tag(args, kwargs)):  # a pipeline's, outside of autograd's pass
            moment = replace(moment, backward=True)
        collective = Collective(public_op(func), op.kind, over, nbytes, moment)
        self.collectives.append(collective)
        self.operations[-1] = collective

    # ---- counts ---------------------------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """Return the number of collectives."""
        return len(self.collectives)

    def get_comm_counts(self) -> OpCounts:
        """Return the number of collectives by op: `counts[torch.ops.c10d_functional.all_reduce]`."""
        return counts(self.collectives)

    def get_total_bytes(self) -> int:
        """Return the bytes that a rank receives in all collectives."""
        return sum(collective.received for collective in self.collectives)

    def get_comm_bytes(self) -> OpCounts:
        """Return the bytes that a rank receives, by op."""
        return received(self.collectives)

    @property
    def comm_counts(self) -> OpCounts:
        """The same as `get_comm_counts()`."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, OpCounts]]:
        """The collectives of each module that has any: `{"Model.layer": {"forward": counts, "backward": counts}}`.

        "Global" is always there, and counts those outside of modules as well.
        """
        found: dict[str, dict[str, list[Collective]]] = {ROOT: {"forward": [], "backward": []}}
        for collective in self.collectives:
            for module in collective.moment.modules:
                passes = found.setdefault(module, {"forward": [], "backward": []})
                passes["backward" if collective.moment.backward else "forward"].append(collective)
        return {module: {name: counts(each) for name, each in passes.items()} for module, passes in found.items()}

    # ---- modules --------------------------------------------------------------------------------------------------

    def get_parameter_info(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the own parameters of each called module that has any, by the names of module and parameter."""
        return {module.name: module.parameters for module in self._modules() if module.parameters}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of all distributed parameters of the called modules, by full name."""
        return {
            f"{module.name}.{name}": placements
            for module in self._modules()
            for name, placements in module.placements().items()
        }

    def _modules(self) -> list[ModuleRecord]:
        return [
            ModuleRecord(name, f"{type(module).__module__}.{type(module).__qualname__}", own)
            for name, module in self._calls.modules.items()
            if name in self._calls.called
            for own in [dict(module.named_parameters(recurse=False))]
        ]

    # ---- text -----------------------------------------------------------------------------------------------------

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of the collectives of each module, and from level 1 on a list of the ops in each.

        0. the collectives of each module that has any
        1. also its class, its parameters, and its ops on distributed tensors
        2. also its ops on local tensors
        3. also ops that compute nothing, such as views
        """
        table = draw_table(self._modules(), self.collectives)
        if noise_level < 1:
            return table
        return "\n\n".join([table, *list_modules(self._modules(), self.operations, noise_level)])

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write the table to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the tree of modules, with the collectives and ops of each, to a JSON file; levels as for the table."""
        Path(file_name).write_text(json.dumps(json_tree(self._modules(), self.operations, noise_level), indent=4))


def _tag(args: Sequence[object], kwargs: dict[str, object]) -> int:
    """Return the tag of a message, the last argument of its op."""
    tag = kwargs.get("tag", args[-1])
    return tag if isinstance(tag, int) else 0
