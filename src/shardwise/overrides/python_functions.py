"""PyTorch's Python functions that create plain tensors in between.

`nn.LSTM` makes its first state, `F.embedding_bag` its offsets. On distributed tensors these are the same on all ranks,
so such a function runs with plain tensors taken as replicated, unless an argument is a plain tensor: that may differ.

>>> torch.masked.mean(x)                   # the count of elements, a plain tensor, is taken as replicated
>>> torch.masked.mean(x, mask=plain)       # still an error: the plain tensor comes from outside
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .._torch import pytree
from .._torch.python_functions import Function, disguised, functions_that_make_tensors
from ..dispatch.modes import implicit_replication
from ..sharding.base import DTensorBase
from .replaced import Replaced

_replaced = Replaced()


def install_python_functions() -> None:
    """Wrap the functions of `functions_that_make_tensors`, in the modules and classes that hold them."""
    _replaced.replace(functions_that_make_tensors(), _wrapped)


def uninstall_python_functions() -> None:
    """Put the original functions back."""
    _replaced.restore()


def _wrapped(original: Function) -> Function:
    # Only names of the closure: PyTorch's script compiler looks up global names in the original's module.
    runs_distributed, replicating = _has_only_distributed_tensors, implicit_replication

    def wrapper(*args: object, **kwargs: object) -> object:
        if not runs_distributed(args, kwargs):
            return original(*args, **kwargs)
        with replicating():
            return original(*args, **kwargs)

    return disguised(wrapper, original)


def _has_only_distributed_tensors(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether there are distributed tensors among the arguments, and no plain ones but those of one element."""
    found = False
    for tensor in _tensors((args, kwargs)):
        if isinstance(tensor, DTensorBase):
            found = True
        elif tensor.numel() != 1:
            return False
    return found


def _tensors(values: object) -> Iterator[Tensor]:
    """Yield all tensors among these values, with the parameters and buffers of modules."""
    for value in pytree.tree_leaves(values):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()
            yield from value.buffers()
