"""check_local_tensors: find local tensors that are not what `from_local` takes them for.

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
    """Inside, the ranks compare the local tensors that become distributed ones. Enter it on all ranks alike.

    That is in `from_local`, and so in `local_map` and in styles that get plain inputs. Otherwise these communicate
    nothing: they take shards for even, or for shards of the given shape, and replicas for equal. Here it is an error,
    on all ranks, if they are not. Each call costs a collective, a host read and a pass over the data.
    """
    before = set_checking(True)
    try:
        yield
    finally:
        set_checking(before)
