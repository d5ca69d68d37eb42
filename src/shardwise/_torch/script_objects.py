"""Process groups as PyTorch passes them to its ops: boxed in a script object."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup


def boxed_group_name(value: object) -> str | None:
    """Return the name of the process group inside a script object; None for any other value."""
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
        return ProcessGroup.unbox(value).group_name
    return None
