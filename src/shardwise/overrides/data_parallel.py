"""`DistributedDataParallel` of modules with distributed parameters.

It averages gradients over its process group, as if each process held the full parameters. Around tensor parallel it
needs the mesh axis that is data parallel (`device_mesh=`), and then gets local shards from `torch.distributed.tensor`.
"""

from __future__ import annotations

import functools
import sys

from torch import nn

from .._torch.data_parallel import ignored_names
from .._torch.python_functions import Function, Place
from ..errors import InputError
from ..sharding.base import DTensorBase
from .replaced import Replaced

_replaced = Replaced()


def install_data_parallel() -> None:
    """Make `DistributedDataParallel` raise an error for distributed parameters that it would treat as plain."""
    _replaced.replace([Place(nn.parallel.DistributedDataParallel, "__init__")], _checking)


def uninstall_data_parallel() -> None:
    """Put the original function back."""
    _replaced.restore()


def _checking(original: Function) -> Function:
    @functools.wraps(original)
    def init(self: nn.Module, module: nn.Module, *args: object, **kwargs: object) -> None:
        _check(module, kwargs.get("device_mesh") is not None)
        original(self, module, *args, **kwargs)

    return init


def _check(module: nn.Module, has_mesh: bool) -> None:
    """Raise an error if the wrapper would treat distributed parameters as plain ones."""
    taken_over = sys.modules.get("torch.distributed.tensor") is sys.modules[__name__.partition(".")[0]]
    if has_mesh and taken_over:
        return
    ignored = ignored_names(module)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensorBase) and name not in ignored:
            first = "" if taken_over else "call shardwise.install() before other imports, and "
            raise InputError(
                "DistributedDataParallel takes plain parameters only, to average their gradients over its processes, "
                f"and {name!r} is the DTensor {parameter._spec!r}",
                "do not wrap a model that is distributed over all processes: its gradients are reduced already. Around "
                f'tensor parallel, {first}pass device_mesh=mesh["dp"], the axis that is data parallel. accelerate '
                "wraps models unless it knows that they are tensor parallel: pass it ParallelismConfig(tp_size=...)",
            )
