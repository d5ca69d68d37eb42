"""Context parallel as a parallel style."""

from __future__ import annotations

import enum
import functools
import inspect

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..dispatch.arguments import Args, Kwargs
from ..parallel import ParallelStyle
from ..sharding.placement import Partial, Replicate, Shard
from ..tensor.dtensor import DTensor
from .attention import _Attention


class _ContextParallel(ParallelStyle):
    """The style of a module that calls attention on this rank's shard of the sequence.

    `SDPA`: inside the module, `F.scaled_dot_product_attention` computes attention over the global sequence. `FLEX`: the
    module gets the keys and values of all ranks, and calls `flex_attention` with this rank's mask.
    """

    class AttentionType(enum.Enum):
        """Which attention the module calls."""

        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        self.seq_dim, self.attention_type = seq_dim, attention_type

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.attention_type is self.AttentionType.FLEX:
            gathering = functools.partial(_with_all_keys, device_mesh, self.seq_dim)
            module.register_forward_pre_hook(gathering, with_kwargs=True)
            return module
        running: list[_Attention] = []

        def enter(*_: object) -> None:
            running.append(_Attention(device_mesh, self.seq_dim))
            running[-1].__enter__()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda *_: running.pop().__exit__(None, None, None), always_call=True)
        return module


def _with_all_keys(mesh: DeviceMesh, dim: int, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Gather the keys and values of all ranks: the second and third argument of a module. Return all arguments.

    The mask among them, made by `_context_parallel_shard`, is that of this rank's queries.
    """
    names = list(inspect.signature(module.forward).parameters)[1:3]
    gathered = [_gathered(value, mesh, dim) if i in (1, 2) else value for i, value in enumerate(args)]
    named = {name: _gathered(kwargs[name], mesh, dim) for name in names if name in kwargs}
    return tuple(gathered), kwargs | named


def _gathered(local: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """Gather the shards of all ranks. In backward their gradients are summed."""
    shards = DTensor.from_local(local, mesh, [Shard(dim)] * mesh.ndim)
    gathered = shards.redistribute(placements=[Replicate()] * mesh.ndim)
    return gathered.to_local(grad_placements=[Partial()] * mesh.ndim)
