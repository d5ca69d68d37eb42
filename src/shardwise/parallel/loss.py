"""loss_parallel: cross-entropy over sharded classes, as PyTorch's context of that name computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..sharding.placement import AnyShard, Partial, Replicate
from ..tensor.dtensor import DTensor

_LOSSES = (F.cross_entropy, F.nll_loss)


class _LossParallel(TorchFunctionMode):
    """Treats plain targets and weights as replicated, and reduces the loss over the axes that shard the classes."""

    def __torch_function__(
        self,
        func: Callable[..., Tensor],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        scores = args[0] if args else kwargs.get("input")
        if func not in _LOSSES or not isinstance(scores, DTensor):
            return func(*args, **kwargs)
        args = tuple(_replicated(value, scores) for value in args)
        kwargs = {name: _replicated(value, scores) for name, value in kwargs.items()}
        return _reduced_over_classes(func(*args, **kwargs), scores)


def _replicated(value: object, like: DTensor) -> object:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def _reduced_over_classes(loss: Tensor, scores: DTensor) -> Tensor:
    """Return the loss, reduced over the axes that shard the classes; over other axes it may stay Partial."""
    if not isinstance(loss, DTensor):
        return loss
    class_dim = min(1, scores.dim() - 1)
    placements = list(loss.placements)
    for axis, of_scores in enumerate(scores.placements):
        if isinstance(of_scores, AnyShard) and of_scores.dim == class_dim and isinstance(placements[axis], Partial):
            placements[axis] = Replicate()
    return loss.redistribute(placements=placements)


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Let cross-entropy, inside, treat plain targets and weights as replicated, and reduce its result over the classes.

    Losses over sharded classes are right without this context too, and never gather the classes. The mesh may have any
    number of axes, and all options of the losses work.

    >>> with loss_parallel():
    ...     loss = F.cross_entropy(logits, target)       # logits sharded in the classes, target plain
    ...     loss.backward()
    """
    with _LossParallel():
        yield
