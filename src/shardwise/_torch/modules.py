"""The dicts in which a module holds its own parameters, buffers and submodules, without those of its submodules.

>>> list(parameters_of(nn.Linear(2, 3)))
['weight', 'bias']

They are written to replace a parameter by a tensor for a while: `setattr` refuses a tensor that is not a `Parameter`.
Values may be None.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["buffers_of", "modules_of", "parameters_of"]


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters, by name; writing to it changes the module."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers, by name; writing to it changes the module."""
    return module._buffers


def modules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of a module's direct submodules, by name; writing to it changes the module."""
    return module._modules
