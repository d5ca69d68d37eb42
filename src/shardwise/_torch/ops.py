"""Op overloads: `torch.ops.aten.add.Tensor` is an `OpOverload`, `torch.ops.aten.add` an `OpOverloadPacket`."""

from __future__ import annotations

from collections.abc import Callable

from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["OpOverload", "OpOverloadPacket", "builtin_of"]


def builtin_of(func: OpOverload) -> Callable[..., object]:
    """The C++ function that an overload calls: the same op without the overload's own Python frame."""
    return func._op
