"""The plans that `hub.load` takes: how the parameters of a model are distributed before they are read."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..fsdp import fully_shard
from ..nn.shard import PlacementFn, shard_parameters
from ..parallel import parallelize_module
from ..parallel.plan import Style
from ..sharding.base import DTensorBase
from ..world import current_world

Plan = Mapping[str, Style] | PlacementFn | str | None

FULLY_SHARDED, OF_MODEL = "fully_sharded", "base_model_tp_plan"


def apply_plan(model: nn.Module, mesh: DeviceMesh | None, plan: Plan) -> nn.Module:
    """Distribute the parameters of a model by a plan, without communication."""
    if plan is None:
        distributed = any(isinstance(parameter, DTensorBase) for parameter in model.parameters())
        if mesh is None or distributed:
            return model
        return shard_parameters(model, mesh, lambda name, parameter: None, src_data_rank=None)
    if plan == FULLY_SHARDED:
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if plan == OF_MODEL:
        plan = _own_plan(model)
    if isinstance(plan, Mapping):
        return parallelize_module(model, mesh, _below_base(model, plan), src_data_rank=None)
    if not callable(plan):
        raise InputError(
            f"hub.load got plan={plan!r}",
            f'pass styles by path, "{OF_MODEL}", "{FULLY_SHARDED}", or a function (name, parameter) -> placements',
        )
    return shard_parameters(model, mesh, plan, src_data_rank=None)


def describe_to_transformers(model: nn.Module, mesh: DeviceMesh | None, plan: Plan) -> None:
    """Set the attributes by which `Trainer` knows that a model is sharded, as `from_pretrained` sets them.

    `Trainer` then neither wraps the model for data parallelism nor moves it, and gives ranks of tensor parallelism the
    same batches. In a simulated world, which is one process, nothing is set.
    """
    owner: Any = model
    if mesh is None or plan is None or mesh.size() == 1 or current_world() is not None:
        return
    if hasattr(owner, "is_distributed_loading_by_transformers"):
        owner._is_distributed_loading_by_transformers = True
        owner._tp_size, owner._fsdp_size = (1, mesh.size()) if plan == FULLY_SHARDED else (mesh.size(), 1)


def _own_plan(model: nn.Module) -> Mapping[str, Style]:
    own = getattr(model, "tp_plan", None) or getattr(getattr(model, "config", None), OF_MODEL, None)
    if not own:
        raise InputError(
            f'hub.load got plan="{OF_MODEL}" for a {type(model).__name__}, whose configuration has no such plan',
            f'pass styles by path, such as {{"layers.*.mlp.up_proj": "colwise"}}, or "{FULLY_SHARDED}"',
        )
    return own


def _below_base(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Return a plan with paths from the model; those of `config.base_model_tp_plan` may begin in its base model."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None

    def is_in(module: nn.Module, pattern: str) -> bool:
        first = pattern.partition(".")[0]
        return any(fnmatch(name, first) for name, _ in module.named_children())

    moved = {}
    for pattern, style in plan.items():
        inside = isinstance(base, nn.Module) and not is_in(model, pattern) and is_in(base, pattern)
        moved[f"{prefix}.{pattern}" if inside else pattern] = style
    return moved


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules to shard separately: those that transformers names, or else the members of module lists."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = [block for each in lists for block in each if next(block.parameters(), None) is not None]
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if id(block) not in inner]
