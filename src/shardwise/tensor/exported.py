"""Ops for `torch.export`: `from_local`, `redistribute` and `to_local` with arguments that are text and numbers.

An exported program is a graph of ops that can be written to a file. So while a module is exported, these methods are
calls of ops, which do the conversion when the program runs:

>>> torch.ops.shardwise.from_local(x, "('cpu', [0, 1, 2, 3], ('tp',))", "(Replicate(),)")
>>> torch.ops.shardwise.redistribute(y, "(Shard(dim=1),)")
>>> torch.ops.shardwise.to_local(z)

`ExportedProgram.run_decompositions` decomposes them into local ops and functional collectives.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._torch.device_mesh import listed
from .._torch.modes import without_modes
from ..errors import InputError
from ..sharding.base import DTensorBase
from ..sharding.mesh import mesh_description, mesh_like
from ..sharding.placement import (
    InterleavedShard,
    OrderedShard,
    P,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    as_placement,
)
from ..sharding.runtime import WorldCache, active_runtime
from ..sharding.spec import DTensorSpec, contiguous_meta

exporting: Callable[[], bool] = torch.compiler.is_exporting
"""Whether `torch.export` is tracing."""

_KINDS: dict[str, Callable[..., object]] = {
    kind.__name__: kind for kind in (Shard, InterleavedShard, OrderedShard, Replicate, Partial, P)
}
_MESHES: WorldCache[str, DeviceMesh] = WorldCache("meshes of exported programs", max_bytes=1 << 16)

# ---- text -----------------------------------------------------------------------------------------------------------


def text_of(placements: Placements | None) -> str | None:
    """Return placements as text: `(Shard(dim=0), Replicate())`, or `P('dp', None)`; None if there are none."""
    if placements is None:
        return None
    if isinstance(placements, P):
        return repr(placements)
    known = [as_placement(p) for p in placements]
    for given, placement in zip(placements, known, strict=True):
        if placement is None or type(placement).__name__ not in _KINDS:
            raise InputError(
                f"torch.export of a conversion with the placement {given!r}, which an exported program cannot hold",
                f"use one of {', '.join(_KINDS)}",
            )
    return "(" + "".join(f"{_placement_text(p)}, " for p in known if p is not None).strip() + ")"


def _placement_text(placement: Placement) -> str:
    fields = ", ".join(f"{name}={getattr(placement, name)!r}" for name in placement.__match_args__)
    return f"{type(placement).__name__}({fields})"


def placements_from(text: str | None) -> Any:
    """Return the placements that a text of `text_of` describes; None for no text."""
    return None if text is None else _value(ast.parse(text, mode="eval").body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        return _KINDS[node.func.id](*map(_value, node.args), **named)
    return tuple(map(_value, node.elts)) if isinstance(node, ast.Tuple) else ast.literal_eval(node)


def mesh_text(mesh: DeviceMesh) -> str:
    """Return a mesh as text: its device type, ranks and axis names."""
    with without_modes():  # a fake tensor has no ranks to read
        device_type, ranks, names = mesh_description(mesh)
    text = repr((device_type, listed(ranks), names))
    _MESHES.of(active_runtime())[text] = mesh
    return text


def mesh_from(text: str) -> DeviceMesh:
    """Return the mesh of this world that a text of `mesh_text` describes."""
    meshes = _MESHES.of(active_runtime())
    found = meshes.get(text)
    if found is None:
        device_type, ranks, names = ast.literal_eval(text)
        with without_modes():
            found = meshes[text] = mesh_like((device_type, torch.tensor(ranks), names))
    return found


# ---- ops ------------------------------------------------------------------------------------------------------------

_library = torch.library.Library("shardwise", "FRAGMENT")


def _define(signature: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Define an op, which traces record as one call, and return it. It runs this function."""
    name = signature.partition("(")[0]
    _library.define(signature)
    _library.impl(name, run, "CompositeImplicitAutograd")
    op: Callable[..., Tensor] = getattr(torch.ops.shardwise, name).default
    return op


def _run_from_local(
    local: Tensor,
    mesh: str,
    placements: str | None = None,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: str | None = None,
) -> Tensor:
    distributed: Any = DTensorBase.concrete
    made: Tensor = distributed._from_local(
        local,
        mesh_from(mesh),
        placements_from(placements),
        run_check,
        shape,
        stride,
        placements_from(grad_placements),
    )
    return made


_from_local = _define(
    "from_local(Tensor local, str mesh, str? placements=None, bool run_check=False, SymInt[]? shape=None, "
    "SymInt[]? stride=None, str? grad_placements=None) -> Tensor",
    _run_from_local,
)


def from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Placements | None,
) -> Any:
    """Make a distributed tensor by a call of an op, for a program that is being exported."""
    return _from_local(
        local,
        mesh_text(mesh),
        text_of(placements),
        run_check,
        None if shape is None else list(shape),
        None if stride is None else list(stride),
        text_of(grad_placements),
    )


def _run_to_local(tensor: Tensor, grad_placements: str | None = None) -> Tensor:
    distributed: Any = tensor
    local: Tensor = distributed._to_local(placements_from(grad_placements))
    return local


_to_local = _define("to_local(Tensor tensor, str? grad_placements=None) -> Tensor", _run_to_local)


def to_local(tensor: DTensorBase, grad_placements: Placements | None) -> Tensor:
    """Return the local shard by a call of an op, for a program that is being exported."""
    local: Tensor = _to_local(tensor, text_of(grad_placements))
    return local


class Redistribution:
    """The op that redistributes, by `run(tensor, target, async_op, forward_dtype, backward_dtype)`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.op = _define(
            "redistribute(Tensor tensor, str placements, bool keep_strides=False, ScalarType? forward_dtype=None, "
            "ScalarType? backward_dtype=None, str? mesh=None) -> Tensor",
            self._run,
        )

    def _run(
        self,
        tensor: DTensorBase,
        placements: str,
        keep_strides: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        mesh: str | None = None,
    ) -> Tensor:
        if mesh is None:
            target = tensor._spec.with_placements(placements_from(placements))
        else:
            meta = contiguous_meta(tensor._spec.shape, tensor._spec.dtype)
            target = DTensorSpec(mesh_from(mesh), placements_from(placements), meta)
        if keep_strides:
            target = target.with_meta(tensor._spec.tensor_meta)
        return self.run(tensor, target, False, forward_dtype, backward_dtype)

    def __call__(
        self,
        tensor: DTensorBase,
        target: DTensorSpec,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> Any:
        """Redistribute by a call of the op, for a program that is being exported."""
        placements = target.placements_alone
        if target.mesh_info is not tensor._spec.mesh_info:
            text = mesh_text(target.mesh)
            return self.op(tensor, text_of(placements), False, forward_dtype, backward_dtype, text)
        keep_strides = tensor._spec.with_placements(placements).tensor_meta.stride != target.tensor_meta.stride
        return self.op(tensor, text_of(placements), keep_strides, forward_dtype, backward_dtype)
