"""Fewer key and value heads than ranks: each rank gets the heads that its query heads attend to.

With 8 query heads, 2 key heads and 4 ranks, a rank has 2 query heads, and the key projection's output is sharded into
half heads. So each key head is repeated for the 2 ranks that need it. A rank's local output is then one key head, for
both of its query heads; the attention module, which expands key heads for groups of 4, gets a group size of 2.

This is for attention modules of model hubs, with the attributes `head_dim` and `num_key_value_groups`, that run on
local tensors. On distributed outputs they need nothing of this.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..sharding.placement import Replicate, Shard
from ..tensor.dtensor import DTensor
from .axis import StyleAxis
from .converters import OutputConverter
from .hooks import register_output_hook
from .partition import is_linear
from .styles import ColwiseParallel

_KEYS_AND_VALUES = ("k_proj", "v_proj")
_QUERIES = ("q_proj",)


class Heads(NamedTuple):
    """The key heads of an attention module, and how often each is repeated for the ranks."""

    number: int
    size: int
    times: int


class RepeatedHeads(ColwiseParallel):
    """Column-wise, with each head of the local output repeated for the ranks that need it."""

    def __init__(self, heads: Heads) -> None:
        super().__init__(output_layouts=Replicate(), use_local_output=False)
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        register_output_hook(module, _HeadsOutput(StyleAxis(device_mesh, self.axis), self.heads))
        return module


class _HeadsOutput(OutputConverter):
    """Repeats the heads of a replicated output and takes this rank's."""

    def __init__(self, axis: StyleAxis, heads: Heads) -> None:
        super().__init__(axis, None, Shard(-1), use_local=True)
        self.heads = heads

    def convert(self, value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        number, size, times = self.heads
        rows: Tensor = value.unflatten(-1, (number, 1, size))
        repeated = rows.expand(*rows.shape[:-2], times, size).flatten(-3)
        return super().convert(repeated)


class AttentionHeads:
    """Finds the projections of attention modules that need `RepeatedHeads`, for one call of `parallelize_module`."""

    def __init__(self) -> None:
        self._groups: dict[nn.Module, int] = {}
        """The `num_key_value_groups` of each attention module before it was changed."""

    def style_for(self, module: nn.Module, attention: nn.Module, name: str, ranks: int) -> ColwiseParallel | None:
        """Return the style for a column-wise projection with a local output; None if the usual one will do."""
        size, groups = getattr(attention, "head_dim", None), getattr(attention, "num_key_value_groups", None)
        if not isinstance(size, int) or not isinstance(groups, int) or not is_linear(module):
            return None
        count, rest = divmod(module.out_features, size)
        if rest or count % ranks == 0 or name not in _KEYS_AND_VALUES + _QUERIES:
            return None
        groups = self._groups.setdefault(attention, groups)
        queries = count if name in _QUERIES else count * groups
        if queries % ranks:
            raise InputError(
                f"the {queries} query heads of a {type(attention).__name__} cannot be divided among {ranks} ranks, as "
                "local outputs need it",
                "keep outputs distributed: hub_plan(plan, use_local_output=False)",
            )
        times = ranks // count if ranks % count == 0 else groups
        attention.__dict__["num_key_value_groups"] = groups // times
        return RepeatedHeads(Heads(count, size, times))
