"""Sparse gradients of embeddings: on distributed tensors they are dense.

A leaf's gradient has the leaf's placements, and a sparse tensor has no dims that could be cut. So what `sparse=True`
asks for is put into the rows that it names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .tables import INSTEAD


def dense(sparse_dim: int, dense_dim: int, size: list[int], indices: Tensor, values: Tensor, **_options: Any) -> Tensor:
    """The sum of the values at each index."""
    if torch._C._current_autograd_node() is None:
        raise InputError(
            "a sparse tensor of distributed indices and values", "keep it dense: use index_put or index_add"
        )
    return values.new_zeros(size).index_put(tuple(indices.unbind(0)), values, accumulate=True)


def dense_bags(*args: Any, **kwargs: Any) -> Any:
    """The gradient of a bag of embeddings, asked for as a dense one."""
    if not args[_SPARSE]:
        return NotImplemented
    return _BAGS(*args[:_SPARSE], False, *args[_SPARSE + 1 :], **kwargs)


_BAGS = torch.ops.aten._embedding_bag_backward.default
_SPARSE = [argument.name for argument in _BAGS._schema.arguments].index("sparse")
INSTEAD["aten::_embedding_bag_backward.default"] = dense_bags
INSTEAD["aten::_sparse_coo_tensor_with_dims_and_tensors.default"] = dense
