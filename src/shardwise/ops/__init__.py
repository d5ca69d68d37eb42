"""The ops: one record for each, in one file for each family.

    op         the record: rule, kernels, local code, decomposition, flags
    registry   the records by name; `resolve` finds the record of any overload, `find` that of any name
    schema     what follows from an op's schema: its tensor arguments, its variants
    call       one call of an op, as its rule sees it
    kernel     kernels and their communication requests, which `drive` carries out
    above_autograd  helpers of overrides above autograd; `overrides/` installs them
    modes      which modes are on in this thread
    explain    a text that describes an op; `served`: by a rule, by a decomposition, or on gathered inputs
    generated  rules found by probing

All other files are families of ops; every file of this folder is imported.
"""

import importlib
import pkgutil

from . import generated
from .registry import registry

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

registry.put_behind(generated.table)
