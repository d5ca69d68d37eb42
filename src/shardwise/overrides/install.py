"""Puts the overrides in place.

Functions in Python are wrapped at once, so that who imports one by name after shardwise gets the wrapped one. Kernels
take a while to register, so they wait for the first mesh.
"""

from __future__ import annotations

from .composites import install_composites
from .derivatives import install_derivatives
from .out_arguments import install_out_arguments
from .python_functions import install_python_functions
from .recurrent import install_recurrent


def install_overrides() -> None:
    """Register the kernels of all functions in C++ that are overridden."""
    install_composites()
    install_out_arguments()
    install_recurrent()
    install_derivatives()


install_python_functions()
