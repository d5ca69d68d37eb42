"""The purposes for which functions of shardwise communicate.

Inside an explanation, the functions in the table below are replaced by wrappers that report their purpose to the
recorder. No other code knows about explanations, and without one they cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from ..._torch.autograd_graph import accumulated_leaf
from ..._torch.backward_pass import current_node
from ..._torch.tls import ThreadValue
from ...comm.buckets import Bucket
from ...comm.token_route import ExpertAxis
from ...erasing.replay import Replay
from ...extend import local_function
from ...fsdp.group import ParameterGroup
from ...fsdp.reduce import Reduction
from ...nn import local_view
from ...ops import context_attention
from ...parallel.converters import Converter, InputConverter
from ...parallel.expert_call import Runner
from ...random import agreement
from ...sharding.shared import SharedContext
from ...sharding.source_lines import Line
from ...tensor import autograd, creation, leaf_gradient
from ...tensor.dtensor import DTensor
from ...transferring.running import TransferRun
from .lines import line_now


class Purpose(NamedTuple):
    """Why a function communicates: one of `records.CAUSES`, and details."""

    cause: str
    detail: str = ""
    """Text for the reason, such as the path of a module, or "a style converts the input of"."""
    leaves: tuple[Tensor, ...] = ()
    """The leaves whose gradients are reduced."""
    line: Line | None = None
    """The line that made the autograd node of the first of these leaves, if it is known."""


Enter = Callable[[Purpose], AbstractContextManager[object]]
"""Returns a context whose communication has this purpose."""
Find = Callable[..., Purpose]
"""Returns the purpose of a function from the arguments of its call."""


def _leaf() -> tuple[Tensor, ...]:
    leaf = accumulated_leaf(current_node())
    return () if leaf is None else (leaf,)


def _always(cause: str, detail: str = "") -> Find:
    return lambda *args, **kwargs: Purpose(cause, detail)


def _of_conversion(converter: Converter, *_: object) -> Purpose:
    what = "input" if isinstance(converter, InputConverter) else "output"
    return Purpose("conversion", f"a style converts the {what} of")


def _of_leaf(*args: object, **kwargs: object) -> Purpose:
    return Purpose("leaf gradient", leaves=_leaf(), line=line_now())


def _of_group(group: ParameterGroup) -> Purpose:
    return Purpose("gather parameters", group.name)


def _of_reduction(reduction: Reduction, *_: object) -> Purpose:
    return Purpose("reduce gradients", reduction.group.name)


class _Buckets:
    """Tracks the leaves whose gradients are in each bucket."""

    def __init__(self) -> None:
        self._added: WeakKeyDictionary[Bucket, list[Purpose]] = WeakKeyDictionary()

    def add(self, bucket: Bucket, *_: object) -> Purpose:
        """Record that the gradient of the present leaf is added to a bucket, and return the purpose of adding it."""
        purpose = _of_leaf()
        if not bucket.started:
            self._added.setdefault(bucket, []).append(purpose)
        return purpose

    def start(self, bucket: Bucket) -> Purpose:
        """Return the purpose of a bucket's communication."""
        added = self._added.get(bucket, [])
        leaves = tuple(leaf for purpose in added for leaf in purpose.leaves)
        line = next((purpose.line for purpose in added if purpose.line is not None), None)
        return Purpose("leaf gradient" if len(leaves) == 1 else "gradient bucket", leaves=leaves, line=line)


def _table() -> tuple[tuple[object, str, Find], ...]:
    buckets = _Buckets()
    return (
        (DTensor, "redistribute", _always("redistribute")),
        (DTensor, "full_tensor", _always("full_tensor")),
        (Converter, "_convert", _of_conversion),
        (Runner, "_local", _always("conversion", "ExpertParallel brings the inputs to the ranks of the experts in")),
        (Runner, "local_parameter", _always("conversion", "ExpertParallel gathers a parameter of")),
        (Runner, "finish", _always("conversion", "ExpertParallel brings back the output of")),
        (local_function, "_with_placements", _always("conversion", "local_map redistributes an argument in")),
        (
            context_attention,
            "_to_layout",
            _always("conversion", "attention brings the positions of some heads together in"),
        ),
        (autograd.Redistribute, "backward", _always("gradient", "a redistribution")),
        (autograd.FromLocal, "backward", _always("gradient", "from_local")),
        (leaf_gradient, "to_spec", _of_leaf),
        (leaf_gradient, "reduced", _of_leaf),
        (Bucket, "add", buckets.add),
        (Bucket, "start", buckets.start),
        (ParameterGroup, "start_gather", _of_group),
        (Reduction, "_start", _of_reduction),
        (Reduction, "_after_scatter", _of_reduction),
        (Replay, "__call__", _always("erased step")),
        (ExpertAxis, "all_to_all", _always("experts")),
        (creation, "_scatter_from", _always("distribute")),
        (local_view, "_take_from_first", _always("distribute", "buffers of the first rank")),
        (TransferRun, "_send", _always("transfer")),
        (agreement, "_ranks_that_differ", _always("agreement")),
        (agreement, "_take_first_state", _always("agreement")),
    )


@contextmanager
def reporting_purposes(enter: Enter) -> Iterator[None]:
    """Run each function of the table that this thread calls in the block inside the context `enter(purpose)`."""
    with _WRAPPED, _enters.changed_to((*_enters.get(), enter)):
        yield


_enters: ThreadValue[tuple[Enter, ...]] = ThreadValue("purposes", ())
"""The recorders of this thread, and of its backward passes."""


@contextmanager
def _wrapped_table() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, find in _table():
            stack.enter_context(_wrapped(owner, name, find))
        yield


_WRAPPED = SharedContext(_wrapped_table)


@contextmanager
def _wrapped(owner: object, name: str, find: Find) -> Iterator[None]:
    before = vars(owner)[name]
    function = before.__func__ if isinstance(before, staticmethod) else before

    @wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        enters = _enters.get()
        if not enters:
            return function(*args, **kwargs)
        purpose = find(*args, **kwargs)
        with ExitStack() as stack:
            for enter in enters:
                stack.enter_context(enter(purpose))
            return function(*args, **kwargs)

    setattr(owner, name, staticmethod(wrapper) if isinstance(before, staticmethod) else wrapper)
    try:
        yield
    finally:
        setattr(owner, name, before)
