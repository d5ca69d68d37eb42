"""The ops: one record for each, in one file for each family.

    op         the record: rule, kernels, local code, decomposition, flags
    registry   the records by name; `resolve(func)` finds the record of any overload: `resolve`
    call       one call of an op, as its rule sees it
    kernel     what kernels are and may ask for; carried out by `drive`
    above_autograd  what overrides of ops share; `overrides` installs them
    modes      which modes are on in this thread
    explain    what is known about an op, in words; how it is served: `served`; ops by name: `find`
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
