"""Rules: one line says what an op is, and everything else follows from it.

    notation   how tensors are written: m (a b) [d] b.. m? _ 1 {x..}
    rule       a line of text as a value, with its clauses
    frame      a rule bound to ranks
    solve      the sizes of its factors
    bind       a rule bound to shapes, and what a choice of cuts then means
    refine     finer factors, where an operand is cut inside a dim
    schema     what an op's schema says: its tensors, and which op it is a variant of
    build      texts for rules that depend on ranks, dims and shapes

>>> bind(parse("m k, k n -> m n ; linear 0 | 1"), [(4, 6), (6, 8)])
m=4 k=6 n=8: m k, k n -> m n ; linear 0 | 1
"""

from .bind import (
    Bound,
    BoundFactor,
    BoundTensor,
    Cuts,
    Passing,
    bind,
    cut_layout,
    local_size,
    output_layout,
    output_partial,
    passes,
    summands,
)
from .build import dims_text, pointwise, reduction, view_rule, whole_dims
from .frame import BindError
from .patterns import RuleError
from .refine import refine
from .rule import Rule, parse, without_operands, without_order
from .schema import TensorArgument, tensor_arguments

__all__ = [
    # what an op is
    "Rule",
    "parse",
    "without_operands",
    "without_order",
    "RuleError",
    # for these shapes
    "bind",
    "refine",
    "Bound",
    "BoundFactor",
    "BoundTensor",
    "BindError",
    # with these cuts
    "Cuts",
    "cut_layout",
    "output_layout",
    "output_partial",
    "local_size",
    "passes",
    "summands",
    "Passing",
    # what schemas say
    "TensorArgument",
    "tensor_arguments",
    # computed texts
    "pointwise",
    "dims_text",
    "whole_dims",
    "reduction",
    "view_rule",
]
