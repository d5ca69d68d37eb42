"""Kernels that run above autograd: they see a call before autograd records it, or decomposes it into other ops.

A kernel is registered at the dispatch key `PythonTLSSnapshot`, which tensor subclasses have and plain tensors lack, so
plain tensors pay nothing. It sees calls with tensors of any subclass, and forwards those that it does not handle:

>>> linear = torch.ops.aten.linear.default
>>> overrides = Overrides()
>>> overrides.add(linear, lambda keys, *args: call_original(linear, keys, *args))
>>> overrides.remove()
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from .modes import count_modes, pop_mode
from .ops import OpOverload

_KEY = DispatchKey.PythonTLSSnapshot
_PYTHON = DispatchKey.Python
_transforms_active = torch._C._are_functorch_transforms_active

Keys = DispatchKeySet
"""The dispatch keys of a call, with which its kernel calls the original op."""


class Overrides:
    """Kernels above autograd that are removed together. An op has at most one."""

    def __init__(self) -> None:
        self._libraries: dict[str, torch.library.Library] = {}

    def __len__(self) -> int:
        return sum(len(library._op_impls) for library in self._libraries.values())

    def add(self, func: OpOverload, kernel: Callable[..., object], key: str = _KEY.name) -> None:
        """Run `kernel(keys, *args, **kwargs)` in the place of an op if a tensor subclass is among its arguments.

        With another dispatch `key`, run it when the dispatcher reaches that key.
        """
        space = func.namespace
        if space not in self._libraries:
            self._libraries[space] = torch.library.Library(space, "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            self._libraries[space].impl(func.name(), kernel, key, with_keyset=True)

    def remove(self) -> None:
        """Remove all these kernels. Relies on `Library._destroy`, which removes what a library registered."""
        for library in self._libraries.values():
            library._destroy()
        self._libraries.clear()


def tensors_in(args: Iterable[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """Return the tensors among the arguments of an op, those in lists included."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [element for element in value if isinstance(element, Tensor)]
    return found


_BELOW: dict[int, tuple[Keys, bool]] = {}
"""The results of `_below`, by the bits of the keys, of which there are a few combinations."""


def _below(keys: Keys) -> tuple[Keys, bool]:
    """Return the keys below a kernel, and whether the next of them is `__torch_dispatch__` of the tensors' class."""
    bits = keys.raw_repr()
    try:
        return _BELOW[bits]
    except KeyError:
        below = keys.remove(_KEY)
        return _BELOW.setdefault(bits, (below, below.highestPriorityTypeId() == _PYTHON))


def called_from_python(func: OpOverload) -> Callable[..., object]:
    """Return a function that calls an op on a tensor of a subclass, without the op's kernel above autograd.

    The op must have a derivative. For methods of a class that do the same as the kernel, to save the time of
    dispatching to it. The function returns NotImplemented where something else must see the call first: modes,
    transforms, inference mode.
    """
    redispatch: Callable[..., object] = func._handle.redispatch_boxed

    def call(tensor: Tensor, *args: object) -> object:
        if _NEEDS_SNAPSHOT or count_modes() or _function_modes() or _transforms_active() or _is_excluded(_AUTOGRAD):
            return NotImplemented
        keys = _keys_of(tensor)
        bits = keys.raw_repr()
        try:
            below = _FROM_AUTOGRAD[bits]
        except KeyError:
            below = _FROM_AUTOGRAD[bits] = _from_autograd(keys)
        return redispatch(below, tensor, *args)

    return call


def _from_autograd(keys: Keys) -> Keys:
    """Return the keys of a tensor from autograd on."""
    while str(keys.highestPriorityTypeId()).partition(".")[2].startswith(("Python", "Autocast")):
        keys = keys.remove(keys.highestPriorityTypeId())
    return keys


_keys_of: Callable[[Tensor], Keys] = torch._C._dispatch_keys
_FROM_AUTOGRAD: dict[int, Keys] = {}
"""The keys of tensors from autograd on, by the bits of all their keys, of which there are a few combinations."""
_AUTOGRAD = DispatchKey.AutogradFunctionality
_is_excluded: Callable[[DispatchKey], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def call_original(func: OpOverload, keys: Keys, *args: object, **kwargs: object) -> object:
    """Call a composite op from its kernel as if it were not overridden: autograd decomposes it into other ops."""
    below, is_last = _below(keys)
    if is_last:
        return dispatch_to_subclass(func, args, kwargs)
    return func.redispatch(below, *args, **kwargs)


def call_with_autograd(func: OpOverload, keys: Keys, *args: object, **kwargs: object) -> object:
    """Call an op that has a derivative from its kernel as if it were not overridden: autograd records a node for it.

    Before such a call reaches the tensors' class, it needs a snapshot of PyTorch's dispatch state, which the fallback
    of the overridden key takes; without it PyTorch 2.11 fails. There the call is made from inside an op of our own,
    which is dispatched through this fallback.
    """
    below, is_last = _below(keys)
    if is_last:
        return dispatch_to_subclass(func, args, kwargs)
    if not _NEEDS_SNAPSHOT or _transforms_active():  # transforms dispatch the unwrapped tensors again, from the top
        return func._handle.redispatch_boxed(below, *args, **kwargs)
    tensors = tensors_in(args, kwargs)
    entered = next((tensor for tensor in tensors if _dispatches(type(tensor))), tensors[0])
    results: list[object] = []
    before = getattr(_call, "run", None)
    _call.run = lambda: results.append(func.redispatch(below, *args, **kwargs))
    try:
        _with_snapshot(entered)
    finally:
        _call.run = before
    return results[0]


_NEEDS_SNAPSHOT = torch.__version__ < (2, 13)  # type: ignore[operator]  # PyTorch's versions compare with tuples
_call = threading.local()
_library = torch.library.Library("shardwise_dispatch", "DEF")
_library.define("with_snapshot(Tensor entered) -> ()")


def _run_call(entered: Tensor) -> None:
    _call.run()


for _key in ("Autograd", "ADInplaceOrView"):  # the highest of the keys that a call may have left, in inference mode too
    _library.impl("with_snapshot", _run_call, _key)
_with_snapshot = torch.ops.shardwise_dispatch.with_snapshot.default


def dispatch_to_subclass(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call `__torch_dispatch__` of the innermost dispatch mode, or of the most derived class among the arguments.

    A kernel above autograd cannot leave this to PyTorch 2.11, which fails without a snapshot of its dispatch state.
    """
    classes = dict.fromkeys(type(tensor) for tensor in tensors_in(args, kwargs))
    types = tuple(filter(_dispatches, classes))
    if count_modes():
        with pop_mode() as mode:
            result = mode.__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            return result
    most_derived = next(cls for cls in types if not any(issubclass(other, cls) for other in types if other is not cls))
    return most_derived.__torch_dispatch__(func, types, args, kwargs)


def _dispatches(cls: type[Tensor]) -> bool:
    """Return whether the class has a `__torch_dispatch__` that ops are dispatched to."""
    return cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
