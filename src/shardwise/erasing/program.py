"""Turn a graph into a Python function: its text, and the objects that the text names.

>>> print(program.text)
def step(x):                                            # f32[2, 16]
    # train.py:12  return F.relu(x @ w).sum()
    mm = aten_mm(x, w)                                  # f32[2, 4]
    ...
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .._torch.below_autograd import below_autograd
from .._torch.ops import packet_name
from ..comm.groups import ranks_of_group
from ..sharding.runtime import active_runtime
from ..sharding.source_lines import RECORDED_LINES, Line
from .effects import is_barrier, is_op, op_of, starts_collective
from .recorder import Constant, Meta

_COLUMN = 72
_DTYPES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}


class Program:
    """The Python function of a graph: `text` is its code, and `run` the function of the placeholders' values."""

    def __init__(
        self, graph: fx.Graph, bindings: dict[fx.Node, Callable[..., object]], notes: dict[fx.Node, str]
    ) -> None:
        self._graph, self._notes = graph, notes
        self._bindings = bindings
        self._names: dict[str, object] = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
        self._name_of: dict[int, str] = {}
        self._groups: dict[str, str] = {}
        self._last_uses = _last_uses(graph)
        self._variables = _variables(graph)
        self._taken = set(self._variables.values())
        self._lines: dict[int, Line] = {}
        self.text = self._write()
        names = {**self._names, "below_autograd": below_autograd, RECORDED_LINES: self._lines}
        exec(compile(self.text, "<erased step>", "exec"), names)
        self.run: Callable[..., tuple[Tensor, ...]] = names["step"]  # type: ignore[assignment]

    def _write(self) -> str:
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        lines = [f"def step({', '.join(self._variables[node] for node in inputs)}):"]
        for node in inputs:
            lines.append(_with_comment(f"    # {self._variables[node]}", self._comment(node)))
        inside, line = False, None
        for node in self._graph.nodes:
            if node.op == "placeholder":
                continue
            if is_barrier(node) or node.op == "output":
                inside = False
            elif not inside:
                lines.append("    with below_autograd():")
                inside = True
            indent = "        " if inside else "    "
            if node.meta.get("line") is not None and node.meta["line"] != line:
                line = node.meta["line"]
                lines.append(f"{indent}# {line}  {line.text}".rstrip())
                self._lines[len(lines)] = line
            lines += self._statement(node, indent)
        return "\n".join(lines) + "\n"

    def _statement(self, node: fx.Node, indent: str) -> list[str]:
        if node.op == "output":
            return [f"{indent}return {self._argument(node.args[0])}"]
        arguments = [self._argument(value) for value in node.args]
        if starts_collective(node):
            arguments[-1] = self._group(node.args[-1])
        arguments += [f"{name}={self._argument(value)}" for name, value in node.kwargs.items()]
        call = f"{self._callee(node)}({', '.join(arguments)})"
        if node.users:
            call = f"{self._variables[node]} = {call}"
        lines = [_with_comment(f"{indent}{call}", self._comment(node))]
        ended = self._last_uses.get(node)
        if ended:
            lines.append(f"{indent}del {', '.join(self._variables[value] for value in ended)}")
        return lines

    def _callee(self, node: fx.Node) -> str:
        target = self._bindings.get(node, node.target)
        return self._named(target, _function_name(node))

    def _named(self, value: object, name: str) -> str:
        found = self._name_of.get(id(value))
        if found is None:
            found, count = name, 1
            while found in self._names or found in self._taken:
                count += 1
                found = f"{name}_{count}"
            self._names[found] = value
            self._name_of[id(value)] = found
        return found

    def _group(self, group: Any) -> str:
        """Return the name in the text for a process group: the names of its mesh axes."""
        if group not in self._groups:
            name = "_".join(re.findall(r"\w+", axes_of(group)))
            self._groups[group] = self._named(Group(group), name if name.isidentifier() else f"group_{name}")
        return self._groups[group]

    def _argument(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._variables[value]
        if isinstance(value, tuple):
            return f"({', '.join(map(self._argument, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name!r}: {self._argument(v)}" for name, v in value.items()) + "}"
        if isinstance(value, Constant):
            value = value.value
        literal = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
        if value is None or (isinstance(value, literal) and not isinstance(value, torch.SymInt)):
            return repr(value)
        return self._named(value, "constant")

    def _comment(self, node: fx.Node) -> str:
        notes = [self._notes[node]] if node in self._notes else []
        meta = node.meta.get("tensor")
        return ", ".join([describe(meta), *notes] if isinstance(meta, Meta) else notes)


class Group(str):
    """The name of a process group. A class, so that equal strings in the arguments do not get the group's name."""


def axes_of(group: str) -> str:
    """Return the mesh axes of a group as text, or its ranks if no mesh has the group."""
    for _, mesh_info in active_runtime().adopted.values():
        for axes, name in mesh_info.groups.items():
            if name == group:
                return ", ".join(mesh_info.names[axis] for axis in axes)
    return f"ranks {ranks_of_group(group)}"


def describe(meta: Meta) -> str:
    """Return dtype and shape as text: `f32[2, 16]`."""
    return f"{_DTYPES.get(meta.dtype, str(meta.dtype).removeprefix('torch.'))}[{', '.join(map(str, meta.shape))}]"


def parameter_names(fn: Callable[..., object]) -> list[str]:
    """Return the names of a function's parameters; none if it has no signature."""
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


def _with_comment(line: str, comment: str) -> str:
    return f"{line.ljust(_COLUMN)}  # {comment}" if comment else line


def _function_name(node: fx.Node) -> str:
    """Return the name in the text for the function that a node calls, before it is made unique."""
    return packet_name(op_of(node)).split("::")[1] if is_op(node) else node.target.__name__  # type: ignore[union-attr]


def _variables(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the variable of each value: inputs have their names, results are `mm_1`, `mm_2`."""
    names = {node: node.name for node in graph.nodes if node.op == "placeholder"}
    taken = set(names.values())
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_function":
            base = _function_name(node).strip("_")
            counts[base] += 1
            while f"{base}_{counts[base]}" in taken:
                counts[base] += 1
            names[node] = f"{base}_{counts[base]}"
    return names


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return for each node the values that it is the last to read: they are deleted after it."""
    seen: set[fx.Node] = set()
    ended: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            seen.update(node.all_input_nodes)
            continue
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                if used.op == "call_function":
                    ended.setdefault(node, []).append(used)
    return ended
