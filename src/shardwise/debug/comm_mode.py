"""CommDebugMode: the communication of a program, counted and drawn, module by module.

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

It works in both worlds. What the ranks of a simulated world do together counts once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from .._torch import pytree
from .._torch.modes import TorchDispatchMode
from .._torch.ops import OpOverload
from ..sharding.mesh import axes_of_group
from ..sharding.placement import Placement
from ..tensor.dtensor import DTensor
from ..world import RankTensor
from .collectives import group_of, kind_of, public_op, received_bytes
from .comm_record import Collective, ModuleRecord, OpCounts, Operation, counts, received
from .comm_table import draw_table, json_tree, list_modules
from .module_calls import ModuleCalls


class CommDebugMode(TorchDispatchMode):
    """Counts the collectives in its block, and the bytes that they bring to a rank.

    Entering it again starts from nothing. A module's figures include those of the modules in it. What a backward pass
    communicates counts for the module whose forward pass made it necessary.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        self._calls = ModuleCalls()
        self.collectives: list[Collective] = []
        self.operations: list[Operation | Collective] = []

    def __enter__(self) -> CommDebugMode:
        self._forget()
        self._following = ExitStack()
        self._following.enter_context(self._calls.following())
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._following.close()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Write an op down and let it go on: to a subclass's own code, in which this mode still watches."""
        kwargs = kwargs or {}
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        inputs = tuple((tuple(t.shape), t._spec if isinstance(t, DTensor) else None) for t in tensors)
        self.operations.append(Operation(func, inputs, self._calls.now()))
        if any(not issubclass(kind, RankTensor) for kind in types):
            return NotImplemented
        # Simulated ranks are one: what happens inside the op is not seen.
        result = func(*args, **kwargs)
        kind = kind_of(func)
        if kind is not None:
            self._count(func, kind, args, kwargs, result)
        return result

    def _count(self, func: OpOverload, kind: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        over = axes_of_group(group_of(args, kwargs))
        nbytes = received_bytes(func, kind, args, kwargs, result)
        collective = Collective(public_op(func), kind, over, nbytes, self._calls.now())
        self.collectives.append(collective)
        self.operations[-1] = collective

    # ---- what was counted ---------------------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return len(self.collectives)

    def get_comm_counts(self) -> OpCounts:
        """The number of collectives by op: `counts[torch.ops.c10d_functional.all_reduce]`."""
        return counts(self.collectives)

    def get_total_bytes(self) -> int:
        """The bytes that a rank receives in all collectives."""
        return sum(collective.received for collective in self.collectives)

    def get_comm_bytes(self) -> OpCounts:
        """The bytes that a rank receives, by op."""
        return received(self.collectives)

    @property
    def comm_counts(self) -> OpCounts:
        """The same as `get_comm_counts()`."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, OpCounts]]:
        """The collectives of each module that has any: `{"Model.layer": {"forward": counts, "backward": counts}}`."""
        found: dict[str, dict[str, list[Collective]]] = {}
        for collective in self.collectives:
            for module in collective.moment.modules:
                passes = found.setdefault(module, {"forward": [], "backward": []})
                passes["backward" if collective.moment.backward else "forward"].append(collective)
        return {module: {name: counts(each) for name, each in passes.items()} for module, passes in found.items()}

    # ---- what the modules are -----------------------------------------------------------------------------------

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """The parameters of each module called that owns some, by the module's name and theirs."""
        return {module.name: module.parameters for module in self._modules() if module.parameters}

    def get_sharding_info(self) -> dict[str, tuple[Placement, ...]]:
        """The placements of all distributed parameters of the modules called, by full name."""
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

    # ---- as text ------------------------------------------------------------------------------------------------

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table of the collectives of each module, and from level 1 on a list of what happened in each.

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
        """Write the tree of modules with what happened in each to a file, as JSON; for the levels see the table."""
        Path(file_name).write_text(json.dumps(json_tree(self._modules(), self.operations, noise_level), indent=4))
