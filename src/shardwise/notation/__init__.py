"""The language of rules: one line describes an op, and how it can be sharded follows from it.

    patterns   how the dims of tensors are written: m (a b) [d] b.. m? _ 1 {x..}
    clauses    what follows the tensors: linear, reduce, kernel, ...
    checks     which rules are invalid
    rule       a parsed rule; the table of clauses
    kind       what happens when a factor is sharded: pass-through, reduced, must be replicated, handled by a kernel
    frame      a rule bound to the ranks of tensors
    solve      the sizes of its factors
    bind       a rule bound to shapes, and the layouts that follow from sharding its factors
    refine     splitting factors as an operand's layout splits its dims
    build      functions that write the text of rules for given ranks, dims and shapes

>>> bind(parse("m k, k n -> m n ; linear 0 | 1"), [(4, 6), (6, 8)])
m=4 k=6 n=8: m k, k n -> m n ; linear 0 | 1
"""

from .bind import (
    Bound,
    BoundFactor,
    BoundTensor,
    FactorShardings,
    Passing,
    bind,
    local_size,
    output_layout,
    output_partial,
    passes,
    sharded_layout,
    summands,
)
from .build import dims_text, pointwise, reduction, replicated_dims, view_rule
from .frame import BindError
from .kind import FactorKind
from .patterns import RuleError
from .refine import refine
from .rule import Rule, parse, without_operands, without_order

__all__ = [
    # rules
    "Rule",
    "parse",
    "without_operands",
    "without_order",
    "RuleError",
    # rules bound to shapes
    "bind",
    "refine",
    "Bound",
    "BoundFactor",
    "FactorKind",
    "BoundTensor",
    "BindError",
    # layouts once axes shard factors
    "FactorShardings",
    "sharded_layout",
    "output_layout",
    "output_partial",
    "local_size",
    "passes",
    "summands",
    "Passing",
    # writing rules
    "pointwise",
    "dims_text",
    "replicated_dims",
    "reduction",
    "view_rule",
]
