"""Names that DistributedDataParallel leaves out."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def ignored_names(module: nn.Module) -> Collection[str]:
    """The names of parameters and buffers that `_set_params_and_buffers_to_ignore_for_model` lets the wrapper skip.

    They are kept in the attribute `_ddp_params_and_buffers_to_ignore` of the module.
    """
    found: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return found
