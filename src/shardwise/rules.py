"""Sharding rules: parse, register, look them up and explain them."""

from . import ops as _ops  # noqa: F401  (the families define their ops)
from .notation import *  # noqa: F403
from .notation import __all__ as _language
from .ops.call import Call
from .ops.explain import Explanation, explain
from .ops.op import Op
from .ops.registry import Registry, register, registry, resolve, rule_for
from .ops.resolve import ResolvedOp
from .ops.schema import TensorArgument, tensor_arguments
from .ops.served import served_by

__all__ = [
    *_language,
    "Call",
    "Explanation",
    "Op",
    "Registry",
    "ResolvedOp",
    "TensorArgument",
    "explain",
    "register",
    "registry",
    "resolve",
    "rule_for",
    "served_by",
    "tensor_arguments",
]
