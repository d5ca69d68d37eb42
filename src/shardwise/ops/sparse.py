"""Sparse tensors are not distributed: what would make one says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ..errors import InputError
from ..notation.schema import overload_key
from .tables import INSTEAD

_MAKING = ("_to_sparse", "_to_sparse_csr", "_to_sparse_csc", "_to_sparse_bsr", "_to_sparse_bsc")


def _refuse(x: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise InputError("a distributed tensor is dense, and cannot become a sparse one", "use x.full_tensor().to_sparse()")


for _name in _MAKING:
    _packet = getattr(torch.ops.aten, _name)
    for _overload in _packet.overloads():
        INSTEAD[overload_key(getattr(_packet, _overload))] = _refuse
