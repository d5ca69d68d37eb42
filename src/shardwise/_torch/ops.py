"""Op overloads: `torch.ops.aten.add.Tensor` is an `OpOverload`, `torch.ops.aten.add` an `OpOverloadPacket`."""

from torch._ops import OpOverload, OpOverloadPacket

__all__ = ["OpOverload", "OpOverloadPacket"]
