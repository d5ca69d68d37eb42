"""Find the tensors that a function captures, and replace them by others.

`score_mod` and `mask_mod` of flex attention read tensors that are not among their arguments: the documents of tokens, a
bias for each head. A rank runs these functions with its own, plain ones.

>>> documents = distribute_tensor(torch.tensor([0, 0, 1]), mesh, [Shard(0)])
>>> same_document = lambda b, h, q, k: documents[q] == documents[k]
>>> local = with_captured(same_document, lambda tensor: tensor.full_tensor())
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from .._torch.modules import buffers_of, modules_of, parameters_of

F = TypeVar("F", bound=Callable[..., object])


def captured_tensors(*functions: Callable[..., object] | None) -> list[Tensor]:
    """Return all tensors that these functions capture, each once, in the order in which they are found."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        found.setdefault(id(tensor), tensor)
        return tensor

    for function in functions:
        if function is not None:
            with_captured(function, note)
    return list(found.values())


def with_captured(function: F, replace: Callable[[Tensor], Tensor]) -> F:
    """Return the function with each captured tensor replaced by `replace(tensor)`; itself if nothing changes.

    Looks into closures, defaults, globals that are tensors or functions, partial functions, methods, containers, and
    those attributes of objects that the function names.
    """
    return _Rebuild(replace).value(function, frozenset())


class _Rebuild:
    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        self.replace = replace
        self.made: dict[int, tuple[object, object]] = {}
        """`id(value)` -> (value, its replacement). While the value is held, no other object gets its id."""

    def value(self, value: object, names: frozenset[str]) -> Any:
        """Return the value with its tensors replaced. `names` are those that the function around it mentions."""
        if isinstance(value, (int, float, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType)):
            return value
        if id(value) in self.made:
            return self.made[id(value)][1]
        self.made[id(value)] = value, value  # for values that contain themselves
        made = self._rebuilt(value, names)
        self.made[id(value)] = value, made
        return made

    def _rebuilt(self, value: Any, names: frozenset[str]) -> object:
        if isinstance(value, Tensor):
            return self.replace(value)
        if isinstance(value, types.FunctionType):
            return value if _is_of_pytorch(value) and not value.__closure__ else self._function(value)
        if isinstance(value, types.MethodType):
            function = self.value(value.__func__, names)
            owner = self.value(value.__self__, names | _names(value.__func__))
            changed = function is not value.__func__ or owner is not value.__self__
            return types.MethodType(function, owner) if changed else value
        if isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            function, args, keywords = (self.value(part, names) for part in parts)
            changed = _differ((function, args, keywords), parts)
            return functools.partial(function, *args, **keywords) if changed else value
        if type(value) in (list, tuple):
            made = [self.value(element, names) for element in value]
            return type(value)(made) if _differ(made, value) else value
        if type(value) is dict:
            entries = {key: self.value(element, names) for key, element in value.items()}
            return entries if _differ(entries.values(), value.values()) else value
        return self._object(value, names)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        names = _names(function)
        cells = function.__closure__ or ()
        held = [_content(cell) for cell in cells]
        closure = [self.value(content, names) for content in held]
        defaults = self.value(function.__defaults__, names)
        keywords = self.value(function.__kwdefaults__, names)
        space = {
            name: (old, self.value(old, names))
            for name in sorted(names & function.__globals__.keys())
            if isinstance(old := function.__globals__[name], (Tensor, types.FunctionType))
        }
        changed = {name: new for name, (old, new) in space.items() if new is not old}
        same = defaults is function.__defaults__ and keywords is function.__kwdefaults__ and not changed
        if same and not _differ(closure, held):
            return function
        made = types.FunctionType(
            function.__code__,
            {**function.__globals__, **changed} if changed else function.__globals__,
            function.__name__,
            defaults,
            tuple(
                cell if new is old else types.CellType(new) for cell, old, new in zip(cells, held, closure, strict=True)
            ),
        )
        made.__kwdefaults__ = keywords
        return made

    def _object(self, value: object, names: frozenset[str]) -> object:
        """Return a copy of an object, or module, with its named attributes and parameters replaced.

        Return the object itself if none changes.
        """
        if isinstance(value, nn.Module):
            names = names | _names(type(value).forward)
        elif callable(value):
            names = names | _names(type(value).__call__)
        held = dict(vars(value)) if hasattr(value, "__dict__") else {}
        if isinstance(value, nn.Module):
            held |= {**parameters_of(value), **buffers_of(value), **modules_of(value)}
        named = {name: held[name] for name in sorted(names & held.keys())}
        changed = {name: new for name, old in named.items() if (new := self.value(old, names)) is not old}
        if not changed:
            return value
        copied = object.__new__(type(value))
        copied.__dict__.update({**vars(value), **changed})  # Python looks here before it asks a module for parameters
        return copied


def _is_of_pytorch(function: types.FunctionType) -> bool:
    return function.__module__ is not None and function.__module__.partition(".")[0] == "torch"


def _names(function: object) -> frozenset[str]:
    """Return the names that a function and those defined inside it mention, as variables or attributes."""
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else frozenset(names_in(code))


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that some code and the functions defined inside it mention."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _differ(new: Iterable[object], old: Iterable[object]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))
