"""check_local_tensors: find local tensors that are not what `from_local` assumes.

>>> with check_local_tensors():
...     model(x)
ShapeError: from_local without shape= assumes shards of equal shape, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..tensor.from_local import set_checking


@contextmanager
def check_local_tensors() -> Iterator[None]:
    """Compare the local tensors of all ranks in every `from_local` inside the block. Enter it on all ranks.

    This includes `local_map` and styles that get plain inputs. Without the check they communicate nothing: they assume
    that shards are even, or shards of the given global shape, and that replicas are equal. With it, a wrong assumption
    is an error on all ranks. Each call costs a collective, a host read and a pass over the data.

    >>> with check_local_tensors():
    ...     y = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate()])
    """
    before = set_checking(True)
    try:
        yield
    finally:
        set_checking(before)
