"""Put shardwise in the place of `torch.distributed.tensor`, in this process.

After `install()`, `import torch.distributed.tensor` gives shardwise: in the user's program, in libraries, and in the
parts of PyTorch that work with distributed tensors (fully_shard, checkpoints, state dicts). It has to come before any
of them has imported PyTorch's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch.distributed

from .._torch.wrapper import Placeholder, settle_dtensor_class
from ..errors import InputError
from ..tensor.flat import use_form_of_pytorch
from .modules import PACKAGE
from .table import FILES, MODULES

THEIRS = "torch.distributed.tensor"
_OLD_SPELLING = "torch.distributed._tensor"
_replaced: dict[str, ModuleType] = {}
_placeholder = Placeholder(THEIRS)


class _AliasLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # What is in sys.modules after this call is what the import returns.
        sys.modules[module.__name__] = importlib.import_module(PACKAGE + module.__name__.removeprefix(THEIRS))


class _AliasFinder(MetaPathFinder):
    """Resolves submodules, such as `torch.distributed.tensor.parallel`, to the modules of shardwise of that name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{THEIRS}."):
            return None
        name = fullname.removeprefix(f"{THEIRS}.")
        if name not in MODULES and name not in FILES:
            raise ModuleNotFoundError(
                f"{fullname}: shardwise replaces {THEIRS} in this process and has no module {name!r}, "
                "a private one of PyTorch's DTensor",
                name=fullname,
            )
        return ModuleSpec(fullname, _AliasLoader())


_finder = _AliasFinder()


def installed() -> bool:
    """Return whether shardwise is in the place of `torch.distributed.tensor`.

    >>> installed()
    False
    """
    return sys.modules.get(THEIRS) is sys.modules[PACKAGE]


def install() -> None:
    """Put shardwise in the place of `torch.distributed.tensor`, in this process.

    Call it before anything else imports `torch.distributed.tensor`: it raises if that has happened.

    >>> import shardwise
    >>> shardwise.install()
    >>> from torch.distributed.fsdp import fully_shard          # works with shardwise.DTensor
    """
    if installed():
        return
    _check_not_too_late()
    for name in [name for name in sys.modules if _is_theirs(name)]:
        _replaced[name] = sys.modules.pop(name)
    # PyTorch's dispatcher looks `torch.distributed.tensor.DTensor` up once, and runs ops of that class by its own
    # code, which bypasses __torch_dispatch__. So it must find another class than ours.
    sys.modules[THEIRS] = _placeholder
    settle_dtensor_class()
    ours = sys.modules[PACKAGE]
    sys.modules[THEIRS] = ours
    torch.distributed.tensor = ours
    sys.meta_path.insert(0, _finder)
    use_form_of_pytorch(True)
    for name in FILES:
        importlib.import_module(f"{THEIRS}.{name}")


def uninstall() -> None:
    """Put `torch.distributed.tensor` back. Modules that imported it meanwhile keep what they imported.

    Names and isinstance tests are PyTorch's again. If PyTorch's dispatcher has not read the class `DTensor` before
    `install()`, it has read a placeholder: then any op on PyTorch's DTensor raises from now on.

    >>> shardwise.uninstall()
    >>> from torch.distributed.tensor import DTensor       # PyTorch's own again
    """
    if not installed():
        return
    sys.meta_path.remove(_finder)
    use_form_of_pytorch(False)
    for name in [name for name in sys.modules if _is_theirs(name)]:
        del sys.modules[name]
    sys.modules.update(_replaced)
    for root in (THEIRS, _OLD_SPELLING):
        name = root.rpartition(".")[2]
        if root in _replaced:
            setattr(torch.distributed, name, _replaced[root])
        elif hasattr(torch.distributed, name):
            delattr(torch.distributed, name)
    _replaced.clear()
    if _placeholder.was_read:
        importlib.import_module(THEIRS).DTensor.__torch_dispatch__ = staticmethod(_refuse_ops)


def _refuse_ops(func: object, *_: object, **__: object) -> object:
    raise InputError(
        f"{func} on PyTorch's DTensor after shardwise.uninstall(): PyTorch's dispatcher reads that class once, and "
        "did so while shardwise replaced it",
        "use shardwise.DTensor, or start a process without shardwise.install()",
    )


def _is_theirs(module: str) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in (THEIRS, _OLD_SPELLING))


def _check_not_too_late() -> None:
    theirs = sys.modules.get(THEIRS)
    if theirs is None:
        return
    imported = {id(module) for name, module in sys.modules.items() if _is_theirs(name)}
    imported |= {id(getattr(theirs, name)) for name in getattr(theirs, "__all__", ()) if name != "Placement"}
    # `import torch.distributed.tensor` makes it an attribute of its package, which `install` replaces.
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if not _is_theirs(name)
        and module is not torch.distributed
        and any(id(value) in imported for value in vars(module or object).copy().values())
    )
    if holders:
        more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
        raise InputError(
            f"shardwise.install(): {', '.join(holders[:3])}{more} have imported {THEIRS} already",
            "call shardwise.install() before any other import but torch, or start the program with "
            "`python -m shardwise.run program.py`",
        )
