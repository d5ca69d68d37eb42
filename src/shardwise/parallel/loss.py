"""loss_parallel: what a program written for PyTorch's context of that name relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..sharding.placement import Partial, Replicate
from ..tensor.dtensor import DTensor

_LOSSES = (F.cross_entropy, F.nll_loss)


class _LossParallel(TorchFunctionMode):
    """Takes plain targets and weights as replicated, and completes the loss over the axes that cut the classes."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scores = args[0] if args else kwargs.get("input")
        if func not in _LOSSES or not isinstance(scores, DTensor):
            return func(*args, **kwargs)
        args = tuple(_as_replica(value, scores) for value in args)
        kwargs = {name: _as_replica(value, scores) for name, value in kwargs.items()}
        return _completed(func(*args, **kwargs), scores)


def _as_replica(value: Any, like: DTensor) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim)


def _completed(loss: Tensor, scores: DTensor) -> Tensor:
    """The loss, summed over the axes that cut the classes; over others it may stay Partial."""
    if not isinstance(loss, DTensor):
        return loss
    classes = min(1, scores.dim() - 1)
    placements = [
        Replicate() if cut.is_shard(classes) and isinstance(of, Partial) else of
        for cut, of in zip(scores.placements, loss.placements, strict=True)
    ]
    return loss.redistribute(placements=placements)


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross-entropy takes plain targets and weights as replicated, and its result is whole over the classes.

    Losses over cut classes are right without this, and never gather the classes. The mesh may have any number of
    axes, and all options of the losses work.

    >>> with loss_parallel():
    ...     loss = F.cross_entropy(logits, target)       # logits cut in the classes, target plain
    ...     loss.backward()
    """
    with _LossParallel():
        yield
