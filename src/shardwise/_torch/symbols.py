"""Sizes that the compiler holds as symbols, so that one graph serves many batch sizes.

A `SymbolicSize` is PyTorch's `SymInt` with a hash, so that layouts, specs and plans, which are looked up by value, may
hold it. Arithmetic returns another one. A comparison (`size % 4 == 0`) is answered for the hint, the size that is being
traced, and PyTorch adds a guard to the graph: a batch with another answer is compiled again.

>>> (rows,) = symbolic(tensor.shape[:1])     # s0, with the hint 8
>>> rows * 2, rows % 2 == 0, hint(rows)      # the second adds a guard to the graph
(2*s0, True, 8)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch.fx.experimental.sym_node import SymNode

from .modes import TorchDispatchMode, without_modes
from .symint import NumberNode, is_symbol

if TYPE_CHECKING:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.proxy import TracerBase

__all__ = [
    "SymbolicSize",
    "active_fake_mode",
    "common_divisor",
    "has_symbols",
    "hint",
    "hinted",
    "shape_inference",
    "specialized",
    "symbolic",
]

T = TypeVar("T")


class SymbolicSize(torch.SymInt):
    """A size as an expression of the symbols of a compilation. Two sizes are equal if their expressions are.

    It refers weakly to the compilation (a `ShapeEnv`): caches that outlive it may hold sizes. Relies on PyTorch reading
    the attribute `node` of a `SymInt`, and on `SymNode`.
    """

    def __init__(self, expression: object, environment: ShapeEnv) -> None:
        self._expression = expression
        self._environment = ref(environment)
        self._last: ref[SymNode] | None = None

    @property
    def node(self) -> SymNode:
        """The node with which PyTorch computes."""
        recorded = _recorded_node(self)
        if recorded is not None:
            self._last = ref(recorded)
        # While the recorder of an op reads its arguments, no recording is active: the last node is used.
        return recorded or (self._last and self._last()) or self._new_node()

    def _new_node(self) -> SymNode:
        environment = self._environment()
        if environment is None:
            raise ReferenceError(f"the size {self._expression} belongs to a compilation that has ended")
        return SymNode(self._expression, environment, int, None)

    def __hash__(self) -> int:
        return hash((id(self._environment), self._expression))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicSize):
            if self._environment is not other._environment:
                return False
            if self._expression == other._expression:
                return True
        if not isinstance(other, (int, torch.SymInt)) or self._environment() is None:
            return False
        with without_modes():
            return bool(torch.SymInt(self.node) == _plain(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return str(self._expression)

    def __str__(self) -> str:
        return str(self._expression)

    def __format__(self, format_spec: str) -> str:
        return format(str(self._expression), format_spec)

    def __copy__(self) -> SymbolicSize:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> SymbolicSize:
        return self


def _recorded_node(size: SymbolicSize) -> SymNode | None:
    """Return the node of a size in the graph that is being recorded; None if there is no such graph.

    Relies on `sympy_expr_tracker`, the symbols that the graph has as inputs. The size is computed from them op by op,
    since PyTorch drops factors when it makes code for a product of three from an expression.
    """
    mode: ProxyTorchDispatchMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    symbols = None if mode is None else getattr(mode.tracer, "sympy_expr_tracker", None)
    if mode is None or symbols is None:
        return None
    nodes = _NODES.setdefault(mode.tracer, {})
    if size._expression not in nodes:
        built = _built(size._expression, symbols)
        if built is None:  # some symbol is no input of the graph, or some function has no op
            built = int(torch.SymInt(size._new_node()))
        nodes[size._expression] = built.node if isinstance(built, torch.SymInt) else size._new_node().wrap_int(built)
    return nodes[size._expression]


_NODES: WeakKeyDictionary[TracerBase, dict[object, SymNode]] = WeakKeyDictionary()
"""For each graph that is being recorded, its nodes by the expressions of sizes."""


def _built(expression: Any, symbols: Mapping[object, object]) -> Any:
    """Return an expression as computed from the symbols of a graph; None if that is impossible."""
    known = symbols.get(expression)
    if known is not None:
        return getattr(known, "value", None)
    if expression.is_Integer:
        return int(expression)
    operation = _OPERATORS.get(type(expression).__name__)
    arguments = [_built(argument, symbols) for argument in expression.args]
    if operation is None or not arguments or any(argument is None for argument in arguments):
        return None
    if operation is pow:
        operation, arguments = operator.mul, arguments[:1] * arguments[1]
    return reduce(operation, arguments)


_OPERATORS: dict[str, Callable[..., object]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": pow,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}


def _closed(name: str) -> Callable[..., object]:
    """Return the operation of `SymInt` with this name, with results that are `SymbolicSize`s, or bools for the hint."""
    operation = getattr(torch.SymInt, name)

    def operate(self: SymbolicSize, *others: object) -> object:
        with without_modes():
            result = operation(torch.SymInt(self.node), *map(_plain, others))
            result = bool(result) if isinstance(result, torch.SymBool) else symbolic(result)
        if isinstance(result, SymbolicSize):
            result.node  # noqa: B018  # enters the size in the graph that is being recorded
        return result

    return operate


_OPERATIONS = "add radd sub rsub mul rmul floordiv rfloordiv mod rmod neg lt le gt ge"
for _name in _OPERATIONS.split():
    setattr(SymbolicSize, f"__{_name}__", _closed(f"__{_name}__"))


def _plain(value: object) -> object:
    return torch.SymInt(value.node) if isinstance(value, SymbolicSize) else value


# ---- sizes in values ------------------------------------------------------------------------------------------------

_NO_SYMBOLS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout))
"""Types of values that are no symbols and contain none. Most lists contain only these, and are skipped."""


def symbolic(value: T) -> T:
    """Return the value with the compiler's symbols, also in lists, as `SymbolicSize`s; constants as numbers.

    A size that depends on data has no hint to plan with: reading it breaks the graph.
    """
    made: Any = value
    if isinstance(value, (dict, list, tuple)):
        made = _mapped(symbolic, value)
    elif type(made) is torch.SymInt and not isinstance(made.node, NumberNode):
        node = made.node
        expression = node.expr
        if expression.is_number:
            made = int(expression)
        elif not node.has_hint():
            made = int(made)
        else:
            made = SymbolicSize(expression, node.shape_env)
            made._last = ref(node)
    return made


def specialized(value: T) -> T:
    """Return the value with the compiler's symbols, also in lists, as numbers. The graph is then valid for these alone.

    Relies on `int(size)`, which adds a guard to the graph. Sizes that differ between simulated ranks are unchanged.
    """
    made: Any = value
    if isinstance(value, (dict, list, tuple)):
        made = _mapped(specialized, value)
    elif is_symbol(value):
        made = int(value)  # type: ignore[call-overload]
    return made


def hint(size: int) -> int:
    """Return the hint of a symbolic size, other sizes unchanged. Adds no guard: for costs, which need not be exact."""
    return int(size.node.hint) if isinstance(size, SymbolicSize) else size


def hinted(value: T) -> T:
    """Return the value with symbolic sizes, also in lists, replaced by their hints."""
    made: Any = _mapped(hinted, value) if isinstance(value, (dict, list, tuple)) else hint(value)  # type: ignore[arg-type]
    return made


def _mapped(change: Callable[[object], object], values: Any) -> object:
    """Return a dict, list, tuple, named tuple or `torch.Size` with changed elements; itself if nothing changes."""
    if isinstance(values, dict):
        return {name: change(value) for name, value in values.items()}
    if _NO_SYMBOLS.issuperset(map(type, values)):
        return values
    made = [change(value) for value in values]
    if all(new is old for new, old in zip(made, values, strict=True)):
        return values
    return type(values)(*made) if hasattr(values, "_fields") else type(values)(made)


def common_divisor(one: int, other: int) -> int:
    """Return the greatest common divisor; of symbolic sizes, one that divides both for all values of the symbols."""
    if not isinstance(one, SymbolicSize) and not isinstance(other, SymbolicSize):
        return math.gcd(one, other)
    expressions = [value._expression if isinstance(value, SymbolicSize) else value for value in (one, other)]
    from sympy import gcd  # type: ignore[import-untyped]  # slow to import, but imported already if sizes are symbols

    found = gcd(*expressions)
    size = one if isinstance(one, SymbolicSize) else other
    return int(found) if found.is_number else symbolic(SymbolicSize(found, size.node.shape_env))


def has_symbols(value: object) -> bool:
    """Return whether this is a symbolic size of the compiler, or a list that contains one."""
    if isinstance(value, (list, tuple)):
        return not _NO_SYMBOLS.issuperset(map(type, value)) and any(map(has_symbols, value))
    return isinstance(value, SymbolicSize) or is_symbol(value)


# ---- shapes of results ----------------------------------------------------------------------------------------------


def active_fake_mode() -> TorchDispatchMode | None:
    """Return the `FakeTensorMode` of this thread; None if there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def shape_inference(*given: object) -> AbstractContextManager[object]:
    """Return a context in which no mode records ops; tensors are fake if `given` contains symbolic sizes.

    Relies on the fake mode that is active while a graph is traced: meta kernels accept no symbols, fake tensors do.
    """
    mode = active_fake_mode() if has_symbols(given) else None
    return without_modes() if mode is None else _with_mode_alone(mode)


@contextmanager
def _with_mode_alone(mode: TorchDispatchMode) -> Iterator[None]:
    with without_modes(), mode:
        yield
