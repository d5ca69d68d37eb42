"""The ops: one file for each family."""

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
    loss,
    matmul,
    norm,
    optim,
    pool,
    random,
    reduce,
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
