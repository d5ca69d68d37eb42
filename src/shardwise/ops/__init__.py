"""The ops: one record for each, in one file for each family.

    op         the record: rule, kernels, local code, decomposition, flags
    registry   the records by name; `resolve(func)` finds the record of any overload: `resolve`
    call       one call of an op, as its rule sees it
    kernel     what kernels are and may ask for; carried out by `drive`
    explain    what is known about an op, in words; how it is served: `served`; ops by name: `find`
    generated  rules found by probing

All other files are families of ops.
"""

from . import (  # noqa: F401
    advanced_indexing,
    attention,
    batch_norm,
    conv,
    copies,
    elementwise,
    embedding,
    extremes,
    generated,
    histogram,
    indexing,
    joins,
    linalg,
    linear,
    loss,
    matmul,
    norm,
    optim,
    pool,
    random,
    recurrent,
    reduce,
    rms_norm,
    scan,
    shapes,
    slices,
    softmax,
    sorting,
    strided,
    variance,
    vector_norm,
    views,
)
from .registry import registry

registry.put_behind(generated.table)
