"""The backends "cudagraph" and "inductor": a recording in stages, each captured or compiled as one graph.

Functions that are not ops run between the stages: optimizer steps, draws from generators, checks of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..errors import EraseError
from .callees import bindings_of
from .effects import is_op
from .program import Program

Run = Callable[..., tuple[Tensor, ...]]


class Stage(NamedTuple):
    """Consecutive ops, as a graph with its own placeholders and output."""

    graph: fx.Graph
    inputs: list[fx.Node]
    """The nodes of the recording whose values the stage takes."""
    outputs: list[fx.Node]
    """The nodes of the recording whose values the stage returns."""


def split(graph: fx.Graph) -> list[Stage | fx.Node]:
    """Return the stages of a recording and the calls between them, in order."""
    parts: list[list[fx.Node] | fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_op(node) or ("pure" in node.meta and not any(map(_is_call, node.all_input_nodes))):
            if not parts or isinstance(parts[-1], fx.Node):
                parts.append([])
            parts[-1].append(node)
        else:
            parts.append(node)
    return [part if isinstance(part, fx.Node) else _stage(part) for part in parts]


def _is_call(node: fx.Node) -> bool:
    """Return whether a node is a function that runs between stages, whose result need not be a tensor."""
    return node.op == "call_function" and not is_op(node) and "pure" not in node.meta


def _stage(nodes: list[fx.Node]) -> Stage:
    inside = set(nodes)
    inputs = list(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users) and "tensor" in node.meta]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    graph.output(tuple(copies[node] for node in outputs))
    return Stage(graph, inputs, outputs)


class Staged:
    """Runs a recording stage by stage. `prepare(graph, inputs)` returns the function of a stage, at its first run."""

    def __init__(self, graph: fx.Graph, prepare: Callable[[fx.Graph, list[Tensor]], Run]) -> None:
        self._placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._results = next(node for node in graph.nodes if node.op == "output").args[0]
        self._parts = split(graph)
        self._prepare = prepare
        self._ready: dict[int, Run] = {}

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run all stages, and return the results of the recording."""
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, given, strict=True))
        for index, part in enumerate(self._parts):
            if isinstance(part, fx.Node):
                args = fx.node.map_arg(part.args, values.__getitem__)
                values[part] = part.target(*args)  # type: ignore[operator]
                continue
            taken = [values[node] for node in part.inputs]
            if index not in self._ready:
                self._ready[index] = self._prepare(part.graph, taken)
            values.update(zip(part.outputs, self._ready[index](*taken), strict=True))
        return tuple(values[node] for node in self._results)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


class OwnInputs:
    """Runs a function on copies of its first `count` inputs, at the same addresses in each call, as CUDA graphs need.

    These are the tensors that a caller passes, and gradients, which are other tensors in each call: a graph captured on
    their memory would read and write that of an earlier call. Those in `written` are copied back. The other inputs are
    the state of the program, and stay the user's memory.
    """

    def __init__(self, run: Run, count: int, written: list[int]) -> None:
        self._run, self._count, self._written = run, count, written
        self._own: list[Tensor] = []

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Copy the inputs, run the function, and copy back what it has written."""
        passed, state = given[: self._count], given[self._count :]
        if not self._own:
            self._own = [tensor.detach().new_empty_strided(tensor.size(), tensor.stride()) for tensor in passed]
        with torch.no_grad():
            for own, tensor in zip(self._own, passed, strict=True):
                _without_repeats(own).copy_(_without_repeats(tensor))
        results = self._run(*self._own, *state)
        with torch.no_grad():
            for index in self._written:
                _without_repeats(passed[index]).copy_(_without_repeats(self._own[index]))
        return results


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return a view without the elements that an expanded tensor repeats: they share memory, and cannot be written."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def captured(graph: fx.Graph, given: list[Tensor]) -> Run:
    """Return a stage as one CUDA graph. Results of calls, at other addresses later, are copied into memory of these."""
    if not all(tensor.is_cuda for tensor in given if isinstance(tensor, Tensor)):
        raise EraseError("backend='cudagraph' got tensors that are not on a GPU", "use backend='eager'")
    program = Program(graph, bindings_of(graph), {})
    static = list(given)
    cuda_graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(cuda_graph, capture_error_mode="thread_local"):
        results = program.run(*static)

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        for here, tensor in zip(static, given, strict=True):
            if tensor is not here and tensor.data_ptr() != here.data_ptr():
                here.copy_(tensor)
        cuda_graph.replay()
        return results

    return run


# ---- PyTorch's compiler ---------------------------------------------------------------------------------------------


def compiled(graph: fx.Graph, given: list[Tensor]) -> Run:
    """Return a stage compiled by torch.compile."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    run: Run = torch.compile(module, backend="inductor", dynamic=False)
    return run
