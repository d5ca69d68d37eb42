"""An `nn.ModuleList` of experts with their parameters stacked, so that they can be sharded as one.

`stack_experts` turns the list into an `ExpertList`: the code of one expert, and for each of its parameters one with a
new first dim for the experts. A rank then holds the parameters of its own experts alone. The state dict keeps the keys
of the list, `3.up.weight`; each entry is sharded over the axis along its first dim, so that no rank holds more of a
state dict than of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..sharding.placement import AnyShard, Replicate, Shard
from ..tensor.dtensor import DTensor
from .local_parameters import owner_of

STACKED = "stacked"


class ExpertList(nn.Module):
    """Experts of one kind. `stacked` is the code of one of them, with the parameters of all."""

    stacked: nn.Module
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: object) -> NoReturn:
        raise InputError(
            f"expert {index} of a list whose {self.number} experts are sharded: a rank has some of them only",
            "call the list with all tokens, experts(tokens, index, weights), instead of one expert after the other",
        )

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # PyTorch's helpers for checkpoints follow the keys of a state dict, `3.up.weight`, through attributes.
        return self.stacked if name.isdigit() and int(name) < self.number else super().__getattr__(name)

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the outputs of this rank's experts, each for as many rows as `sizes` says."""
        parameters = dict(self.stacked.named_parameters())
        outputs = []
        for expert, own in enumerate(rows.split(list(sizes))):
            of_expert = {name: parameter[expert] for name, parameter in parameters.items()}
            outputs.append(torch.func.functional_call(self.stacked, of_expert, (own,)))
        return torch.cat(outputs)


def stack_experts(experts: nn.ModuleList) -> None:
    """Turn a list of experts into an `ExpertList`, in place."""
    _check_alike(experts)
    template, number = experts[0], len(experts)
    for path, parameter in list(template.named_parameters()):
        every = [expert.get_parameter(path) for expert in experts]
        stacked = nn.Parameter(torch.stack([p.detach() for p in every]), requires_grad=parameter.requires_grad)
        owner, name = owner_of(template, path)
        owner.register_parameter(name, stacked)
    for name in list(dict(experts.named_children())):
        delattr(experts, name)
    experts.__class__ = ExpertList  # type: ignore[assignment]
    listed: Any = experts
    listed.number = number
    listed.add_module(STACKED, template)
    listed.register_state_dict_post_hook(_split_entries)
    listed.register_load_state_dict_pre_hook(_stack_entries)


def _check_alike(experts: nn.ModuleList) -> None:
    if not len(experts) or list(experts.named_buffers()) or list(experts.named_parameters(recurse=False)):
        raise InputError(
            f"ExpertParallel for a {type(experts).__name__} of {len(experts)} experts, with buffers or parameters of "
            "its own, or empty",
            "give it experts that have parameters only",
        )
    first = [(name, p.shape, p.dtype, p.requires_grad) for name, p in experts[0].named_parameters()]
    for index, expert in enumerate(experts):
        found = [(name, p.shape, p.dtype, p.requires_grad) for name, p in expert.named_parameters()]
        if type(expert) is not type(experts[0]) or found != first:
            raise InputError(
                f"expert {index} is a {type(expert).__name__} with other parameters than expert 0, a "
                f"{type(experts[0]).__name__}",
                "give all experts of a list one class and the same shapes",
            )


# ---- state dicts ----------------------------------------------------------------------------------------------------


def _split_entries(module: ExpertList, state: dict[str, Tensor], prefix: str, _: object) -> None:
    """Replace the entries of stacked parameters by those of each expert."""
    paths = [path for path, _ in module.stacked.named_parameters()]
    split = {path: _by_features(state.pop(f"{prefix}{STACKED}.{path}")).unbind(0) for path in paths}
    for index in range(len(module)):
        for path in paths:
            state[f"{prefix}{index}.{path}"] = split[path][index]


def _by_features(stacked: Tensor) -> Tensor:
    """Return stacked parameters sharded along the first dim of each expert, in the place of the experts."""
    if not isinstance(stacked, DTensor):
        return stacked
    instead = Shard(1) if stacked.dim() > 1 else Replicate()
    placements = [instead if isinstance(p, AnyShard) and p.dim == 0 else p for p in stacked.placements]
    return stacked.redistribute(placements=placements)


def _stack_entries(module: ExpertList, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Replace the entries of each expert by those of stacked parameters; incomplete ones are left, and reported."""
    for path, parameter in module.stacked.named_parameters():
        keys = [f"{prefix}{index}.{path}" for index in range(len(module))]
        if all(key in state for key in keys):
            entries = [state.pop(key) for key in keys]
            stacked = torch.stack(entries)
            if isinstance(parameter, DTensor) and isinstance(stacked, DTensor):
                stacked = stacked.redistribute(placements=parameter.placements)
            state[f"{prefix}{STACKED}.{path}"] = stacked
