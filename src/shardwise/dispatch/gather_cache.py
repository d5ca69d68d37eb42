"""What was made of a tensor last, so that the next one who wants it need not make it again.

Several ops often take the same input: q, k and v of an attention. One gather then serves all of them. One result is
remembered at a time, and let go with the tensor it was made from, so that memory is not held for long.

>>> last = Last()
>>> last.keep(x, "whole", whole)
>>> last.find(x, "whole") is whole, last.find(x.add_(1), "whole")
(True, None)
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..world import RankTensor


class _Made(NamedTuple):
    source: weakref.ref[Tensor]
    version: int
    key: Any
    result: Tensor
    result_version: int


class Last:
    """The last thing made, of one tensor. A write to either of the two ends it."""

    def __init__(self) -> None:
        self.made: _Made | None = None

    def find(self, source: Tensor, key: Any) -> Tensor | None:
        """What was made of this tensor under this key, if that was last, and both are still as they were."""
        made = self.made
        if made is None or made.source() is not source or made.key != key:
            return None
        written = made.version != source._version or made.result_version != made.result._version
        return None if written else made.result

    def keep(self, source: Tensor, key: Any, result: Tensor) -> None:
        """Remember this, and forget what was before. Writes to inference tensors are not counted, so not these."""
        if source.is_inference() or result.is_inference() or result is source:
            self.made = None
        else:
            self.made = _Made(weakref.ref(source, self._drop), source._version, key, result, result._version)

    def _drop(self, source: Any) -> None:
        if self.made is not None and self.made.source is source:
            self.made = None


# ---- local parts ----------------------------------------------------------------------------------------------------
#
# Users can write a local part behind its tensor's back. The part counts that itself, but for views of it, which count
# for themselves. So a tensor of which a view's part was handed out is not trusted.

_handed_out: Any = WeakTensorKeyDictionary()


def mark_exposed(tensor: Tensor) -> None:
    """Note that the local part of a tensor is in the user's hands."""
    base = tensor._base
    if base is not None and not is_weight(base):
        _handed_out[base] = True


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is learnt. What is made of it for one op should not outlive that; and modules that are moved
    swap their weights, which a weak reference forbids."""
    # A view is asked for less: to say whether it is a leaf it would look at what was written since.
    return getattr(tensor, "_is_param", False) or (tensor._base is None and tensor.requires_grad and tensor.is_leaf)


def state(local: Tensor) -> Any:
    """Which memory a local part is, and how often it was written; None where that is not counted."""
    if local.is_inference():
        return None
    if isinstance(local, RankTensor):  # written as one, or rank by rank
        states = local._version, *map(state, local.shards)
        return None if None in states else states
    return local.untyped_storage()._cdata, local.storage_offset(), local._version


def state_of(tensor: Any, root: Any) -> Any:
    """The state of a tensor's data as far as that can be told: that of its own part, and of what it is a view of."""
    if tensor.is_inference() or is_weight(root) or root in _handed_out:
        return None
    if tensor is root:
        return state(tensor._local_tensor)
    both = state(tensor._local_tensor), state(root._local_tensor)
    return None if None in both else both
