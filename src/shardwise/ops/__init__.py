"""The ops: one file for each family."""

from . import (  # noqa: F401
    attention,
    batch_norm,
    conjugate,
    conv,
    copies,
    decompositions,
    elementwise,
    extremes,
    generated,
    histogram,
    indexing,
    indexing_kernels,
    inverse,
    linalg,
    loss,
    matmul,
    norm,
    optim,
    optim_kernels,
    pool,
    random,
    reduce,
    reduce_kernels,
    resize,
    scan,
    shapes,
    shapes_kernels,
    softmax,
    sparse,
    sparse_gradients,
    views,
)
from .registry import registry

registry.put_behind(generated.table)
