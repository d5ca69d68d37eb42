"""Puts the overrides in place. They take a while, so they wait for the first mesh."""

from __future__ import annotations

from .composites import install_composites
from .derivatives import install_derivatives
from .out_arguments import install_out_arguments
from .python_functions import install_python_functions
from .recurrent import install_recurrent


def install_overrides() -> None:
    """Let PyTorch's functions that need it run on distributed tensors."""
    install_composites()
    install_out_arguments()
    install_recurrent()
    install_derivatives()
    install_python_functions()
