"""Context parallel as a parallel style."""

from __future__ import annotations

import enum

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..parallel import ParallelStyle
from .attention import _Attention


class _ContextParallel(ParallelStyle):
    """The style of a module that calls attention with its arguments: they hold this rank's shard of the sequence."""

    class AttentionType(enum.Enum):
        """Which attention the module calls."""

        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        if attention_type is not self.AttentionType.SDPA:
            raise InputError(f"context parallel of {attention_type.value}", "use F.scaled_dot_product_attention")
        self.seq_dim, self.attention_type = seq_dim, attention_type

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        running: list[_Attention] = []

        def enter(*_: object) -> None:
            running.append(_Attention(device_mesh, self.seq_dim))
            running[-1].__enter__()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda *_: running.pop().__exit__(None, None, None), always_call=True)
        return module
