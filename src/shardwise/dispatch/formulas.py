"""Derivative formulas of PyTorch in which plain tensors are the same on all ranks.

A formula makes tensors from sizes and numbers (cumprod fills in ones), or from a plain operand that its op has accepted
as replicated in forward (a power computes the logarithm of its exponent). Only the formula may use such tensors with
distributed ones; a hook that the user registers on the same node of autograd may not. So the node is marked when it is
recorded: its prehook, which runs after the user's tensor hooks, notes that the formula begins, and its hook that it has
ended. A plain gradient that the formula returns becomes a replicated one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .._torch import pytree
from .._torch.autograd_graph import next_node_number, node_number
from .._torch.backward_pass import current_node, current_pass, materialized, metadata_of
from .._torch.node_hooks import HookRegistration, UnpackHookWrapping
from ..ops.replicated import as_replicated
from ..sharding.base import DTensorBase

Gradients = tuple[Tensor | None, ...]

_RUNNING = "shardwise: backward passes that are in the formula of this node"
"""A node's metadata holds, under this key, the passes by number: two threads may run passes over one graph, and a pass
that failed in a formula must not count as running."""

_JOINS = "shardwise: the formula of this node is one call"
"""The key in the metadata of a node whose formula takes plain tensors in one call only (see `mark_join`)."""
_HIDDEN = "shardwise: this node was found behind a write to a view, and marked"


def in_formula() -> bool:
    """Return whether the formula of a marked node runs in this thread."""
    node = current_node()
    return node is not None and current_pass() in metadata_of(node).get(_RUNNING, ())


def mark_formula(node: Node) -> None:
    """Take plain tensors as replicated in the formula of this node, in every backward pass."""
    node.register_prehook(_begin)
    node.register_hook(_end)


def mark_formula_of_plain(node: Node) -> None:
    """Take plain tensors as replicated in the formula of a plain tensor's node.

    A write of distributed values into the tensor recorded that node. Unlike with `mark_formula`, plain gradients that
    arrive are not checked: the tensor's gradient is plain.
    """
    node.register_prehook(_enter_formula)
    node.register_hook(_end)


def mark_join(node: Node) -> None:
    """Take plain tensors as replicated in the first call of this node's formula, if some gradient is missing.

    For an op that returns pieces of a tensor, such as `split`: its formula joins their gradients in one call, with
    plain zeros for pieces that have none.
    """
    node.register_prehook(_begin_join)


def mark_write(node: Node) -> None:
    """Take plain tensors as replicated in the formula of the node that a write to a view recorded on the base.

    That node runs the formula of the written op's node, which it hides. The hidden node is found in the graph of a
    gradient that is itself differentiable: formulas use the tensor that was written, which the hidden node computes.
    """
    mark_formula(node)
    node.register_hook(_mark_hidden)


def _mark_hidden(grad_inputs: Gradients, grad_outputs: Gradients) -> None:
    """Mark the nodes between the gradients that the formula took and the tensors that the op took."""
    node = current_node()
    if node is None or not torch.is_grad_enabled():
        return
    seen = {function for function, _ in node.next_functions}
    seen.update(grad.grad_fn for grad in grad_outputs if grad is not None)
    found = [grad.grad_fn for grad in grad_inputs if grad is not None]
    while found:
        function = found.pop()
        if function is None or function in seen or not function.next_functions:  # a leaf's node has no next functions
            continue
        seen.add(function)
        found.extend(following for following, _ in function.next_functions)
        if _HIDDEN not in metadata_of(function):
            metadata_of(function)[_HIDDEN] = True
            mark_formula(function)


def _begin(grad_outputs: Gradients) -> None:
    if not _are_foreign(grad_outputs):
        _enter()


def _enter_formula(grad_outputs: Gradients) -> None:
    _enter()


def _begin_join(grad_outputs: Gradients) -> None:
    if None in grad_outputs and not _are_foreign(grad_outputs):
        _enter()
        metadata_of(cast(Node, current_node()))[_JOINS] = True


def _are_foreign(gradients: Gradients) -> bool:
    """Return whether some of these gradients of distributed tensors are plain and not zero.

    Formulas of PyTorch may return plain zeros. Other plain gradients come from functions of the user.
    """
    plain = [g for g in gradients if g is not None and not isinstance(g, DTensorBase) and g.dim()]
    return bool(plain) and any(bool(materialized(g.detach()).any()) for g in plain)


def _end(grad_inputs: Gradients, grad_outputs: Gradients) -> Gradients | None:
    _leave()
    mark_held_result()
    like = next((g for g in grad_outputs if isinstance(g, DTensorBase)), None)
    if like is None or all(g is None or isinstance(g, DTensorBase) for g in grad_inputs):
        return None
    return tuple(g if g is None or isinstance(g, DTensorBase) else as_replicated(g, like) for g in grad_inputs)


def _outside(hook: Callable[..., object]) -> Callable[..., object]:
    def run(*arguments: object) -> object:
        if not in_formula():
            return hook(*arguments)
        _leave()
        try:
            return hook(*arguments)
        finally:
            _enter()

    return run


hook_registration = HookRegistration(
    {_begin, _enter_formula, _begin_join}, {_end}, _outside, lambda: mark_held_result()
)
"""While it is installed, prehooks that a program registers on a marked node run outside of its formula."""

unpack_hook_wrapping = UnpackHookWrapping(_outside)
"""While it is installed, unpack hooks of a program run outside of the formula that reads the saved tensor. So does what
`torch.utils.checkpoint` recomputes."""


def _enter() -> None:
    node = current_node()
    if node is not None:
        metadata_of(node).setdefault(_RUNNING, set()).add(current_pass())


def _leave() -> None:
    node = current_node()
    if node is not None:
        metadata_of(node).get(_RUNNING, set()).discard(current_pass())


# ---- the results of ops that accepted a plain tensor ----------------------------------------------------------------


class _Held(threading.local):
    """The function that marks the nodes of the last call that accepted a plain tensor, until it is called."""

    mark: Callable[[], None] | None = None


_held = _Held()


def hold(mark: Callable[[], None]) -> None:
    """Call `mark` as soon as autograd has recorded the call that runs now.

    Ops run below autograd, which records the node when they have returned. So `mark` is called at the next call that
    accepts a plain tensor, or at the end of the formula or `implicit_replication` block that accepts them.
    """
    mark_held_result()
    _held.mark = mark


def hold_result(result: object) -> None:
    """Mark the node of a result of an op that accepted a plain tensor, as soon as autograd has recorded it."""
    mark_held_result()
    _end_join()
    if torch.is_grad_enabled():
        tensors = [value for value in pytree.tree_leaves(result) if isinstance(value, DTensorBase)]
        hold(partial(_mark_results, [Recorded.now(value, len(tensors)) for value in tensors]))


def _end_join() -> None:
    node = current_node()
    if node is not None and _JOINS in metadata_of(node) and in_formula():
        _leave()


def mark_held_result() -> bool:
    """Mark the nodes of the last call that accepted a plain tensor, if they are not marked yet; returns whether."""
    mark, _held.mark = _held.mark, None
    if mark is None:
        return False
    mark()
    return True


class Recorded(NamedTuple):
    """A tensor that a call returns or writes, before autograd has recorded the call."""

    tensor: Tensor
    number: int
    """Of the next node."""
    tensors: int
    """How many tensors the call returns or writes: each may have a node."""

    @classmethod
    def now(cls, tensor: Tensor, tensors: int) -> Recorded:
        """Return a record of this tensor at the end of the call, below autograd."""
        return cls(tensor, next_node_number(), tensors)

    def node(self) -> Node | None:
        """Return the node that autograd has recorded for the call, if it has.

        It is made before the op runs; that of a write to a view, on the base, afterwards. Nodes of later writes are not
        of this call, nor are those before it: some may be functions of the user.
        """
        base, number = self.tensor._base, self.number
        first = number - self.tensors if base is None else number
        node = (self.tensor if base is None else base).grad_fn
        while node is not None and node_number(node) >= first + self.tensors:
            node = node.next_functions[0][0] if node.next_functions else None
        return node if node is not None and node_number(node) >= first else None


def _mark_results(results: Sequence[Recorded]) -> None:
    for result in results:
        node = result.node()
        if node is not None:
            (mark_formula if result.tensor._base is None else mark_write)(node)
