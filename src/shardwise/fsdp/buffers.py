"""The memory of the parameters of one dtype: a flat buffer of local shards, and one of gathered parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch.modules import parameters_of
from ..comm.on_ranks import shard_outside
from ..errors import InputError
from ..tensor.dtensor import DTensor
from ..world import shards_of
from .memory import Arrangement, Piece, View, arrange
from .parameter import ShardedParameter, shard_of
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .ranks import allocate, free, on_each_rank, same_memory
from .sharded import replace_by, shard_data

_ALIGNMENT = 16
"""Bytes to which pieces are aligned on a GPU, where kernels load that many at once."""


class Buffers:
    """The parameters of one dtype in a group, and their memory."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.parameters = list(parameters)
        self.ranks = parameters[0].axes.ranks
        self.mesh_info = parameters[0].axes.mesh_info
        self.dtype = parameters[0].spec.dtype
        self.device = device
        casts = mp_policy.param_dtype is not None and self.dtype.is_floating_point
        self.gathered_dtype: torch.dtype = mp_policy.param_dtype if casts else self.dtype  # type: ignore[assignment]
        self.offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
        self._arrangements: dict[tuple[int, tuple[int, ...] | None], Arrangement] = {}
        self._views: dict[tuple[int, tuple[int, ...] | None], list[View]] = {}
        self.flat: Tensor | None = None
        self.gathered: Tensor | None = None
        self.sent: list[Tensor] = []
        self.received: list[Tensor] = []
        self.unreduced: dict[int, Tensor] = {}
        """By index of the parameter: gradients that are reduced over the axis that shards, not over the other one."""

    # ---- places -------------------------------------------------------------------------------------------------

    def arrangement(self, rank: int | None, chosen: tuple[int, ...] | None = None) -> Arrangement:
        """Return the places of all parameters, or of those with the chosen indices, in the buffers of a rank."""
        key = (-1 if rank is None else rank, chosen)
        found = self._arrangements.get(key)
        if found is None:
            parameters = self.parameters if chosen is None else [self.parameters[i] for i in chosen]
            align = 1 if self.device.type == "cpu" else _ALIGNMENT // self.dtype.itemsize
            shapes = [parameter.shape_at(rank) for parameter in parameters]
            found = self._arrangements[key] = arrange(shapes, self.ranks, max(align, 1))
        return found

    def new_flat(self, dtype: torch.dtype, device: torch.device, chosen: tuple[int, ...] | None = None) -> Tensor:
        """Return a flat buffer for the local shards: of all parameters, zeros; of the chosen ones, uninitialised."""
        make = torch.zeros if chosen is None else torch.empty
        pin = self.offload is not None and self.offload.pin_memory and torch.cuda.is_available()
        pin = pin and device.type == "cpu"
        return on_each_rank(
            lambda rank: make(self.arrangement(rank, chosen).numel, dtype=dtype, device=device, pin_memory=pin),
            mesh_info=self.mesh_info,
        )

    def pieces_of(self, flat: Tensor, chosen: tuple[int, ...] | None = None) -> list[Tensor]:
        """Return what a rank sends or receives for each parameter, as vectors that include unused rows."""

        def pieces(rank: int | None, flat: Tensor) -> list[Tensor]:
            found = self.arrangement(rank, chosen).pieces
            return [flat.as_strided((piece.numel,), (1,), piece.start) for piece in found]

        return on_each_rank(pieces, flat)

    def shards_of(self, flat: Tensor, chosen: tuple[int, ...] | None = None) -> list[Tensor]:
        """Return the local shards of the parameters as views of a flat buffer, in their shapes."""

        def shards(rank: int | None, flat: Tensor) -> list[Tensor]:
            return [flat.as_strided(*view) for view in self._shard_views(rank, chosen)]

        return on_each_rank(shards, flat)

    def _shard_views(self, rank: int | None, chosen: tuple[int, ...] | None) -> list[View]:
        key = (-1 if rank is None else rank, chosen)
        found = self._views.get(key)
        if found is None:
            parameters = self.parameters if chosen is None else [self.parameters[i] for i in chosen]
            pieces = self.arrangement(rank, chosen).pieces
            found = [p.shard_view(piece, rank) for p, piece in zip(parameters, pieces, strict=True)]
            self._views[key] = found
        return found

    # ---- local shards -------------------------------------------------------------------------------------------

    def shard_device(self) -> torch.device:
        """Return the device on which local shards are stored."""
        return torch.device("cpu") if self.offload is not None else self.device

    def shard(self, full_locals: Sequence[Tensor | None]) -> None:
        """Copy each rank's rows of the parameters into a new flat buffer. `full_locals` have all rows.

        A parameter given as None is sharded already: its shard is copied from the buffer of another group.
        """
        if self.parameters[0].axes.mesh_info.outside:
            for parameter in self.parameters:
                parameter.hold_nothing(self.gathered_dtype, self.device)
                replace_by(parameter, shard_outside(parameter.spec.ndim, self.dtype, self.shard_device()))
            return
        on_meta = any(local is not None and local.is_meta for local in full_locals)
        flat = self.new_flat(self.dtype, torch.device("meta") if on_meta else self.shard_device())
        for i, (parameter, local, place) in enumerate(
            zip(self.parameters, full_locals, self.shards_of(flat), strict=True)
        ):

            def piece_at(rank: int | None, i: int = i) -> Piece:
                return self.arrangement(rank).pieces[i]

            if local is None:
                _move(parameter, place)
                continue
            if not on_meta:
                shard_data(parameter, piece_at, local, flat)
            replace_by(parameter, place)
        self._use(flat)

    def remove(self, parameter: ShardedParameter) -> None:
        """Remove a parameter that joins another group. The others move to a new buffer before the next gather."""
        self.parameters.remove(parameter)
        self._arrangements.clear()
        self._views.clear()
        self.flat = self.gathered = None
        self.sent, self.received = [], []

    def __deepcopy__(self, memo: dict[int, object]) -> Buffers:
        copied = copy.copy(self)
        memo[id(self)] = copied
        copied.parameters = copy.deepcopy(self.parameters, memo)
        copied._arrangements = {}
        copied._views = {}
        copied.unreduced = {}
        copied.flat = copied.gathered = None
        copied.sent, copied.received = [], []
        return copied

    def adopt_changes(self) -> None:
        """Make a new flat buffer if local shards have other memory, after `to_empty` or new parameters."""
        changed = False
        for parameter in self.parameters:
            module, name = parameter.owners[0]
            now = parameters_of(module)[name]
            if now is not parameter.sharded and now is not None:
                _check_replacement(parameter, now)
                parameter.sharded = now
                parameter.put(now)
                changed = True
            if shard_of(parameter.sharded) is not parameter.local:
                _check_replacement(parameter, parameter.sharded)
                changed = True
        if self.flat is None or (changed and not self._is_packed()):
            self._repack()

    def version(self) -> int:
        """Return a number that grows when a parameter is written, directly or through its local shard."""
        local = 0 if self.flat is None else shards_of(self.flat)[0]._version
        return local + sum(parameter.sharded._version for parameter in self.parameters)

    def _is_packed(self) -> bool:
        """Return whether all local shards are in their places in the flat buffer."""
        if self.flat is None or self.flat.is_meta:
            return False
        shards = [shard_of(parameter.sharded) for parameter in self.parameters]
        for parameter, shard, place in zip(self.parameters, shards, self.shards_of(self.flat), strict=True):
            if shard.device.type != place.device.type or not same_memory(shard, place):
                return False
            parameter.local = shard
        return True

    def _repack(self) -> None:
        flat = self.new_flat(self.dtype, self.shard_device())
        for parameter, place in zip(self.parameters, self.shards_of(flat), strict=True):
            _move(parameter, place)
        self._use(flat)

    def _use(self, flat: Tensor) -> None:
        self.flat = flat
        self.sent = [] if self.casts() else self.pieces_of(flat)

    def casts(self) -> bool:
        """Return whether parameters are gathered in another dtype, or on another device, than that of their shards."""
        return self.gathered_dtype != self.dtype or self.offload is not None

    # ---- gathered parameters ------------------------------------------------------------------------------------

    def to_send(self) -> list[Tensor]:
        """Return this rank's input to a gather: its shards without a copy, or cast by one kernel."""
        if not self.casts():
            return self.sent
        assert self.flat is not None
        return self.pieces_of(self.flat.to(device=self.device, dtype=self.gathered_dtype, non_blocking=True))

    def make_gathered(self) -> None:
        """Create the buffer of gathered parameters, without memory, and the parameters that are views of it."""
        self.gathered = on_each_rank(
            lambda rank: torch.empty(
                self.arrangement(rank).gathered_numel, dtype=self.gathered_dtype, device=self.device
            ),
            mesh_info=self.mesh_info,
        )
        for i, parameter in enumerate(self.parameters):

            def place(rank: int | None, buffer: Tensor, i: int = i) -> Tensor:
                piece = self.arrangement(rank).pieces[i]
                return buffer[piece.gathered_start : piece.gathered_start + piece.numel * self.ranks]

            def full(rank: int | None, buffer: Tensor, i: int = i, parameter: ShardedParameter = parameter) -> Tensor:
                return parameter.gathered_in(buffer, self.arrangement(rank).pieces[i])

            self.received.append(on_each_rank(place, self.gathered))
            # `.data` has its own version counter: writes of a gather do not count, so backward accepts what it saved.
            parameter.set_gathered(on_each_rank(full, self.gathered).data)
        free(self.gathered)

    def allocate(self) -> None:
        """Allocate memory for the gathered parameters."""
        if self.gathered is None:
            self.make_gathered()
        assert self.gathered is not None
        allocate(self.gathered)

    def keep_share(self, count: int) -> list[Tensor]:
        """Return this rank's share of each gathered parameter, of which `count` neighbouring ranks hold one copy."""
        index_at = self.parameters[0].index_at

        def share(rank: int | None, gathered: Tensor) -> Tensor:
            return gathered.view(count, -1)[index_at(rank) % count].clone()

        return [on_each_rank(share, gathered) for gathered in self.received]

    def free(self) -> None:
        """Free the gathered parameters."""
        assert self.gathered is not None
        free(self.gathered)


def _check_replacement(parameter: ShardedParameter, new: Tensor) -> None:
    """Raise an error if a module's parameter is no longer the one that was sharded."""
    spec = new._spec if isinstance(new, DTensor) else None
    if spec is None or spec.layout is not parameter.spec.layout or new.dtype != parameter.spec.dtype:
        found = f"a plain {new.dtype} tensor of shape {list(new.shape)}" if spec is None else f"{spec!r}"
        raise InputError(
            f"fully_shard made the parameter {parameter.name!r} {parameter.spec!r}, and now it is {found}, which it "
            "cannot gather",
            "change the shape and dtype of parameters before fully_shard, or compute in another dtype by "
            "mp_policy=MixedPrecisionPolicy(param_dtype=...); assign a state dict of DTensors with the same placements",
        )


@torch.no_grad()
def _move(parameter: ShardedParameter, place: Tensor) -> None:
    """Copy the local shard of a sharded parameter to another buffer, and make the parameter a view of that."""
    sharded = parameter.sharded
    if not place.is_meta:
        place.copy_(shard_of(sharded))
    sharded.data = DTensor.wrap(place, parameter.spec)
    parameter.local = shard_of(sharded)
