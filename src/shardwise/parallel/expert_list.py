"""An `nn.ModuleList` of experts with stacked parameters, so that the experts can be sharded over an axis.

`stack_experts` turns the list into an `ExpertList`: the code of one expert, whose parameters have a new first dim for
the experts. A rank then holds only the parameters of its own experts. The state dict keeps the keys of the list, such
as `3.up.weight`. Each entry is sharded over the axis along its first dim, so that the state dict takes no more memory
than the parameters.
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
    """Experts of one class. `stacked` is one of them, with the stacked parameters of all."""

    stacked: nn.Module
    number: int

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: object) -> NoReturn:
        raise InputError(
            f"expert {index} cannot be taken from {self.number} sharded experts: a rank has only some of them",
            "call the list with all tokens, experts(tokens, index, weights), instead of one expert after the other",
        )

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        # PyTorch's helpers for checkpoints follow the keys of a state dict, `3.up.weight`, through attributes.
        return self.stacked if name.isdigit() and int(name) < self.number else super().__getattr__(name)

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the outputs of this rank's experts; `sizes` are the numbers of rows of each."""
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
    if not len(experts):
        raise InputError(f"ExpertParallel got an empty {type(experts).__name__}", "apply it to a list of experts")
    others = [name for name, _ in (*experts.named_buffers(), *experts.named_parameters(recurse=False))]
    if others:
        raise InputError(
            f"ExpertParallel cannot stack a {type(experts).__name__} of {len(experts)} experts that has "
            f"{', '.join(others)}: it stacks parameters of the experts only, not buffers or parameters of the list",
            "move them out of the list",
        )
    first = [(name, p.shape, p.dtype, p.requires_grad) for name, p in experts[0].named_parameters()]
    for index, expert in enumerate(experts):
        found = [(name, p.shape, p.dtype, p.requires_grad) for name, p in expert.named_parameters()]
        if type(expert) is not type(experts[0]) or found != first:
            raise InputError(
                f"ExpertParallel cannot stack experts that differ: expert {index} is a {type(expert).__name__} with "
                f"{_described(found)}, expert 0 a {type(experts[0]).__name__} with {_described(first)}",
                "give all experts of a list one class, and parameters of the same names, shapes and dtypes",
            )


def _described(parameters: list[tuple[str, torch.Size, torch.dtype, bool]]) -> str:
    listed = (f"{name} {list(shape)} {dtype}{'' if grad else ' (frozen)'}" for name, shape, dtype, grad in parameters)
    return ", ".join(listed) or "no parameters"


# ---- state dicts ----------------------------------------------------------------------------------------------------


def _split_entries(module: ExpertList, state: dict[str, Tensor], prefix: str, _: object) -> None:
    """Replace the entries of the stacked parameters in a state dict by one entry for each expert."""
    paths = [path for path, _ in module.stacked.named_parameters()]
    split = {path: _by_features(state.pop(f"{prefix}{STACKED}.{path}")).unbind(0) for path in paths}
    for index in range(len(module)):
        for path in paths:
            state[f"{prefix}{index}.{path}"] = split[path][index]


def _by_features(stacked: Tensor) -> Tensor:
    """Return a stacked parameter, sharded along the first dim of each expert instead of over experts."""
    if not isinstance(stacked, DTensor):
        return stacked
    instead = Shard(1) if stacked.dim() > 1 else Replicate()
    placements = [instead if isinstance(p, AnyShard) and p.dim == 0 else p for p in stacked.placements]
    return stacked.redistribute(placements=placements)


def _stack_entries(module: ExpertList, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Replace the entries of each expert by stacked ones. Incomplete sets are left: `load_state_dict` reports them."""
    for path, parameter in module.stacked.named_parameters():
        keys = [f"{prefix}{index}.{path}" for index in range(len(module))]
        if all(key in state for key in keys):
            entries = [state.pop(key) for key in keys]
            stacked = torch.stack(entries)
            if isinstance(parameter, DTensor) and isinstance(stacked, DTensor):
                stacked = stacked.redistribute(placements=parameter.placements)
            state[f"{prefix}{STACKED}.{path}"] = stacked
