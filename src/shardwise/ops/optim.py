"""Optimizers: fused updates of parameters, and ops on lists that no op on one tensor stands for."""

from __future__ import annotations

from ..notation.schema import tensor_arguments
from .call import Call
from .tables import register, register_table


def fused(call: Call) -> str:
    """One parameter's update: all its state is cut alike; counts of steps, scales and the like belong to no dim."""
    inputs, outputs = [], []
    for argument, tensor in zip(tensor_arguments(call.op), call.tensors, strict=True):
        listed = argument.kind == "Tensor[]" and tensor is not None and argument.name != "state_steps"
        inputs.append("x.." if listed or (tensor is None and argument.kind == "Tensor[]") else "_..")
        if listed and argument.write:
            outputs.append("x..")
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"


for name in ("adam", "adamw", "sgd", "adagrad"):
    for overload in ("default", "tensor_lr"):
        register(f"aten::_fused_{name}_.{overload}", fused)

# With numbers for each element in one tensor.
for name in ("addcmul", "addcdiv"):
    passing = "linear 0+1 | 0+2" if name == "addcmul" else "linear 0+1"
    for suffix in ("", "_"):
        register(f"aten::_foreach_{name}{suffix}.Tensor", f"b?.., b?.., b?.., _ -> b.. ; {passing}")

register_table(
    {
        "aten::_foreach_max": "x.. -> ; monotone 0 ; reduce max",
        "aten::_foreach_powsum": "x.. -> ",
    }
)
