"""The norm of gradients on several meshes, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..tensor.dtensor import DTensor
from ..world import RankTensor

__all__ = ["clip_by_norm", "norm_of_all"]


def norm_of_all(gradients: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the total norm of gradients, which may be on several meshes, as a plain tensor."""
    by_mesh: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = []
    for grouped in by_mesh.values():
        norm = nn.utils.get_total_norm(grouped, norm_type)
        local = norm.full_tensor() if isinstance(norm, DTensor) else norm
        norms.append(local.shards[0] if isinstance(local, RankTensor) else local)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


def clip_by_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place by `max_norm / norm` if that is below 1."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))
