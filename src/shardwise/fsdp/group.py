"""A group of parameters: gathered by one collective, reduced by one, and freed together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._torch.modules import parameters_of
from .._torch.tools import shown_in_profile
from ..dispatch.gather_cache import forget_gathered
from ..errors import InputError
from ..sharding.mesh import MeshInfo
from .axes import DataAxes
from .buffers import Buffers
from .parameter import Owner, ShardedParameter
from .policies import MixedPrecisionPolicy, OffloadPolicy
from .sharded import shard_parameter
from .transfer import Wait, all_gather


class _Kept(NamedTuple):
    """This rank's share of gathered parameters that `ranks` neighbouring ranks hold together."""

    ranks: int
    shares: list[Tensor]


class ParameterGroup:
    """The parameters of one call of `fully_shard`: sharded, being gathered, or gathered."""

    def __init__(
        self, name: str, axes: DataAxes, device: torch.device, mp_policy: MixedPrecisionPolicy, offload: OffloadPolicy
    ) -> None:
        self.name = name
        self.axes = axes
        self.device = device
        self.mp_policy = mp_policy
        self.offload = offload
        self.outside = axes.mesh_info.outside
        """Whether this process is not in the mesh. It runs the same program, without data and communication."""
        self.parameters: list[ShardedParameter] = []
        self.buffers: list[Buffers] = []
        self.gathered = False
        self._wait: Wait | None = None
        self._kept: _Kept | None = None
        self._versions: list[int] = []
        self._shown: tuple[MeshInfo | None] | tuple[()] = ()
        """`(mesh of the inputs,)` while modules have the gathered parameters; () while they have the sharded ones."""

    # ---- sharding -----------------------------------------------------------------------------------------------

    def shard(
        self,
        parameters: Sequence[tuple[str, nn.Parameter, list[Owner], int]],
        moved: Sequence[ShardedParameter] = (),
    ) -> None:
        """Shard these parameters, each given as `(name, parameter, owners, dim to shard)`.

        The parameters in `moved` come from other groups, and are sharded already.
        """
        made = [shard_parameter(name, tensor, owners, self.axes, dim) for name, tensor, owners, dim in parameters]
        self.parameters = [*(parameter for parameter, _ in made), *moved]
        by_dtype: dict[torch.dtype, list[tuple[ShardedParameter, Tensor | None]]] = {}
        for parameter, local in [*made, *((parameter, None) for parameter in moved)]:
            by_dtype.setdefault(parameter.spec.dtype, []).append((parameter, local))
        for pairs in by_dtype.values():
            buffers = Buffers([parameter for parameter, _ in pairs], self.device, self.mp_policy, self.offload)
            buffers.shard([local for _, local in pairs])
            self.buffers.append(buffers)

    def remove(self, parameter: ShardedParameter) -> None:
        """Remove a parameter that joins another group."""
        self.parameters.remove(parameter)
        for buffers in self.buffers:
            if parameter in buffers.parameters:
                buffers.remove(parameter)
        self.buffers = [buffers for buffers in self.buffers if buffers.parameters]

    def __deepcopy__(self, memo: dict[int, object]) -> ParameterGroup:
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.parameters = copy.deepcopy(self.parameters, memo)
        copied.buffers = copy.deepcopy(self.buffers, memo)
        return copied

    @property
    def nbytes(self) -> int:
        """The bytes of the gathered parameters on a rank."""
        return sum(b.arrangement(_any_rank(b)).gathered_numel * b.gathered_dtype.itemsize for b in self.buffers)

    # ---- gathering ----------------------------------------------------------------------------------------------

    def start_gather(self) -> bool:
        """Start to gather the parameters unless they are gathered, or being gathered. Return whether it was started."""
        if self.gathered or self._wait is not None or not self.parameters or self.outside:
            return False
        self._check_data()
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.no_grad():
            kept, self._kept = self._kept, None
            for buffers in self.buffers:
                if kept is None:
                    buffers.adopt_changes()
                buffers.allocate()
                inputs += buffers.to_send() if kept is None else []
                outputs += buffers.received
            self._versions = [buffers.version() for buffers in self.buffers]
            name = self.axes.shard_group if kept is None else self.axes.group_of_neighbours(kept.ranks)
            with shown_in_profile("shardwise::gather parameters of {}", self.name):
                self._wait = all_gather(outputs, inputs if kept is None else kept.shares, name)
        return True

    def free_if_written(self) -> None:
        """Free the gathered parameters if the sharded ones were written since, e.g. by an optimizer."""
        if self.gathered and self._versions != [buffers.version() for buffers in self.buffers]:
            self.free()

    def finish_gather(self) -> bool:
        """Wait until the parameters are gathered. Return whether a gather was in flight."""
        if self._wait is None:
            return False
        self._wait()
        self._wait = None
        self.gathered = True
        forget_gathered()  # cached operands may have been gathered from earlier values of these parameters
        return True

    def is_under_way(self) -> bool:
        """Return whether a gather is in flight."""
        return self._wait is not None

    def free(self, neighbours: int | None = None) -> bool:
        """Free the gathered parameters. Return whether there were any.

        With `neighbours`, each of that many neighbouring ranks keeps a share, from which the next gather collects them.
        """
        self.finish_gather()
        self._kept = None
        if not self.gathered:
            self.show_sharded()
            return False
        if neighbours is not None:
            shares = [share for buffers in self.buffers for share in buffers.keep_share(neighbours)]
            self._kept = _Kept(neighbours, shares)
        self.show_sharded()
        for buffers in self.buffers:
            buffers.free()
        self.gathered = False
        return True

    def _check_data(self) -> None:
        for parameter in self.parameters:
            module, name = parameter.owners[0]
            now = parameters_of(module)[name]
            if now is not None and now.is_meta:
                raise InputError(
                    f"the parameter {parameter.name!r} is on the meta device and has no data",
                    f'call model.to_empty(device="{self.device.type}") and initialise it, or load a state dict, before '
                    "the first forward pass",
                )

    # ---- gradients ----------------------------------------------------------------------------------------------

    def has_gradients(self) -> bool:
        """Return whether there are gradients that are not reduced yet."""
        return any(parameter.has_gradient() for parameter in self.parameters)

    # ---- parameters of the modules ------------------------------------------------------------------------------

    def show_gathered(self, inputs: MeshInfo | None) -> None:
        """Set the gathered parameters on their modules: for inputs distributed over this mesh, or local ones (None)."""
        if self._shown and self._shown[0] is inputs:
            return
        for parameter in self.parameters:
            parameter.put(parameter.gathered(inputs))
        self._shown = (inputs,)

    def show_sharded(self) -> None:
        """Set the sharded parameters on their modules."""
        if self._shown:
            for parameter in self.parameters:
                parameter.put(parameter.sharded)
            self._shown = ()


def _any_rank(buffers: Buffers) -> int | None:
    """Return the first simulated rank, or None: this process's own rank."""
    return 0 if buffers.parameters[0].axes.mesh_info.simulated else None
