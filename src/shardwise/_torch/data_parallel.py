"""Parameters that DistributedDataParallel ignores."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def ignored_names(module: nn.Module) -> Collection[str]:
    """Return the names of parameters and buffers set by `_set_params_and_buffers_to_ignore_for_model`.

    Relies on the attribute `_ddp_params_and_buffers_to_ignore` of the module.
    """
    found: Collection[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return found
