"""Which function runs an op on RankTensors: one of its own, named after the op, or the op itself on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from .._torch.ops import OpOverload
from ..errors import WorldError
from .rank_op import describe

__all__ = ["implementation_of"]

Implementation = Callable[[Sequence[object], dict[str, object] | None], object]

# Ops of these namespaces communicate. Running one on every rank would call the fake process group, which moves no data
# and raises no error.
_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem")


@cache
def implementation_of(func: OpOverload) -> Implementation:
    """Return the function of (args, kwargs) that runs this op on RankTensors.

    A function named after the op in `aten_ops`, `functional_ops` or `c10d_ops` comes first. Otherwise the op runs on
    every rank, unless it communicates: that is an error.
    """
    # Imported here because these modules use RankTensor, whose ops are looked up by this one.
    from . import aten_ops, c10d_ops, functional_ops, mapping, writing

    namespace, name = func._schema.name.split("::")
    modules = {
        "aten": aten_ops,
        "c10d": c10d_ops,
        "_c10d_functional": functional_ops,
        "_c10d_functional_autograd": functional_ops,
    }
    module = modules.get(namespace)
    if module is not None and name in module.__all__ and not func._schema.overload_name:
        return partial(_call, getattr(module, name))
    if namespace in _COMMUNICATING:
        raise WorldError(
            f"{func} is not available in a simulated world",
            "use the functional collectives (torch.ops._c10d_functional), or dist.all_reduce, broadcast, all_gather, "
            "reduce_scatter, all_to_all and those of them that end in _tensor or _single",
        )
    op = describe(func)
    if op.writes:
        return partial(writing.run_writing, op)
    return partial(mapping.run_view if op.view else mapping.run, op)


def _call(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object] | None) -> object:
    return function(*args, **kwargs) if kwargs else function(*args)
