"""Calls of single ops, tried with the placements that the op's rule allows.

>>> calls = recorded(torch.nn.functional.linear, (x, weight), {})
>>> [str(call.func) for call in calls]
['aten.t.default', 'aten.mm.default', ...]
>>> try_call(calls[1], (2,))
Tried(cases=13, failures=[])

Operands get placements that need no communication: sharded along a factor of the rule, or Partial if the rule allows
it. Random placements would rarely be one of these.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .._torch import pytree
from ..comm.groups import adopt
from ..dispatch.arguments import Argument
from ..dispatch.bind_call import BoundCall, Place, bind_call
from ..dispatch.result_meta import NoRule
from ..errors import ShardwiseError
from ..notation import Bound, Passing, passes, sharded_layout, summands
from ..ops.registry import rule_for
from ..ops.schema import tensor_arguments
from ..sharding.layout import Factor, Layout
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec, TensorMeta, contiguous_meta
from ..tensor.dtensor import DTensor
from ..world import simulate
from .hostile import OPS, hostile_calls
from .recording import Recorded
from .values import assemble, with_spec

REASON = 300  # characters of an error that a failure has
AVERAGED = 1e30  # the largest number that averages are tried with

HALF = (torch.float16, torch.bfloat16, torch.complex32)
"""Dtypes in which the order of a sum changes its result visibly."""


class Failure(NamedTuple):
    """A failure: its kind (`wrong` numbers or an `error`), the op, the specs of its operands, and the error."""

    kind: str
    op: str
    where: str
    text: str

    @classmethod
    def of(cls, error: Exception, op: str, where: str = "") -> Failure:
        """Return the failure that an error shows: a failed comparison means wrong numbers."""
        kind = "wrong" if isinstance(error, AssertionError) else "error"
        where = where or " ".join(getattr(error, "__notes__", ()))
        return cls(kind, op, where, f"{type(error).__name__}: {' '.join(str(error).split())[:REASON]}")


class Tried(NamedTuple):
    """How many placements of a call were tried, and the failures."""

    cases: int
    failures: list[Failure]


# ---- a rule bound to a call -----------------------------------------------------------------------------------------


def bound_call(
    call: Recorded, mesh_info: MeshInfo, specs: Mapping[Place, DTensorSpec] = MappingProxyType({})
) -> BoundCall | None:
    """Bind a call as dispatch does, with these specs for some operands and the others replicated.

    Returns None if the op has no rule for the call, is an op on lists, or turns a tensor into a view of itself, for
    which dispatch makes the view.
    """
    resolved = rule_for(call.func)
    if resolved is None or resolved.variant == "foreach" or resolved.in_place_view is not None:
        return None

    def argument(place: Place, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return Argument(TensorMeta(value.shape, value.stride(), value.dtype), specs.get(place))

    try:
        return bind_call(resolved, *call.replaced(argument), mesh_info)
    except NoRule:
        return None


def split_call(call: Recorded, found: BoundCall, mesh_info: MeshInfo, seed: int) -> BoundCall | None:
    """Bind a call again with one operand sharded inside a dim, which splits a factor; None if none can be split."""
    places = [(index, dim) for index, operand in enumerate(found.operands) for dim in range(len(operand.tensor.shape))]
    random.Random(f"{seed} {found.bound!r} {mesh_info.sizes}").shuffle(places)
    for index, dim in places:
        tensor, place = found.operands[index].tensor, found.places[index]
        size = tensor.shape[dim]
        outer = next((n for n in range(2, size // 2 + 1) if size % n == 0), None)
        value = call.at(place)
        if outer is None or len(tensor.dims[dim]) != 1 or not isinstance(value, Tensor):
            continue
        dims = [(Factor(n, ()),) for n in tensor.shape]
        split = (Factor(outer, ()), Factor(size // outer, (0,)))
        layout = Layout.make(mesh_info.sizes, [*dims[:dim], split, *dims[dim + 1 :]])
        spec = DTensorSpec.from_layout(mesh_info, layout, contiguous_meta(value.shape, value.dtype))
        refined = bound_call(call, mesh_info, {place: spec})
        if refined is not None and len(refined.bound.factors) > len(found.bound.factors):
            return refined
    return None


# ---- the placements that a rule allows -------------------------------------------------------------------------------

Option = int | tuple[str, Passing] | None
"""What an axis does: shard a factor, hold operands as Partial by an op, or nothing."""


def allowed(
    bound: Bound, mesh_sizes: tuple[int, ...], limit: int, seed: int, among: Collection[int] | None = None
) -> list[tuple[Option, ...]]:
    """Return combinations of what the axes may do: all, or a sample of `limit` of them.

    With `among`, only those in which some axis shards one of these factors.
    """
    ranks = math.prod(mesh_sizes)
    options: list[Option] = [
        index
        for index, factor in enumerate(bound.factors)
        if factor.size and not factor.must_replicate and not (factor.even and factor.size % ranks)
    ]
    options += [(op, way) for op in OPS for way in passes(bound, op)]
    if len(mesh_sizes) > 1:
        options.append(None)
    found = list(itertools.product(options, repeat=len(mesh_sizes)))
    if among is not None:
        found = [chosen for chosen in found if not set(among).isdisjoint(o for o in chosen if isinstance(o, int))]
    if len(found) > limit:
        found = random.Random(f"{seed} {bound!r} {mesh_sizes}").sample(found, limit)
    return found


def layouts(found: BoundCall, mesh_sizes: tuple[int, ...], chosen: Sequence[Option]) -> list[Layout]:
    """Return the layout of each operand when the axes do this."""
    shardings = tuple((axis, option) for axis, option in enumerate(chosen) if isinstance(option, int))
    result = []
    for operand in found.operands:
        partial: list[tuple[int, str]] = []
        for axis, option in enumerate(chosen):
            if isinstance(option, tuple) and operand.position in option[1].operands:
                partial.append((axis, option[0]))
            elif isinstance(option, int) and operand.position in summands(found.bound, option):
                partial.append((axis, "sum"))
        result.append(sharded_layout(operand.tensor, found.bound, mesh_sizes, shardings, tuple(partial)))
    return result


# ---- trying them ----------------------------------------------------------------------------------------------------


def try_call(call: Recorded, mesh_sizes: tuple[int, ...], limit: int = 12, seed: int = 0) -> Tried:
    """Compare a call with the plain call, for up to `limit` of the placements that its rule allows on a mesh.

    For half as many, some operand is sharded inside a dim.
    """
    with simulate(math.prod(mesh_sizes)):
        mesh_info = adopt(init_device_mesh("cpu", mesh_sizes))
        try:
            found = bound_call(call, mesh_info)
            split = None if found is None else split_call(call, found, mesh_info, seed)
        except Exception as error:
            return Tried(1, [Failure.of(error, str(call.func), "binding its rule")._replace(kind="error")])
        if found is None:
            return Tried(0, [])
        try:
            wanted = _run(call, {})
        except Exception:
            return Tried(0, [])  # an op on memory that only the program's own tensors have
        tries = [(found, chosen) for chosen in allowed(found.bound, mesh_sizes, limit, seed)]
        if split is not None:
            old = {factor.name for factor in found.bound.factors}
            new = [index for index, factor in enumerate(split.bound.factors) if factor.name not in old]
            tries += [(split, chosen) for chosen in allowed(split.bound, mesh_sizes, limit // 2, seed, new)]
        done = [_try(call, bound, mesh_info, chosen, wanted) for bound, chosen in tries]
        done += list(_try_hostile(call, found, mesh_info))
        return Tried(sum(one.cases for one in done), [failure for one in done for failure in one.failures])


def _try(
    call: Recorded,
    bound: BoundCall,
    mesh_info: MeshInfo,
    chosen: Sequence[Option],
    wanted: list[object],
    infinite_is_nan: bool = False,
) -> Tried:
    """Compare the call with these placements."""
    try:
        given = _distributed(call, bound, mesh_info, layouts(bound, mesh_info.sizes, chosen))
    except ShardwiseError:
        return Tried(0, [])  # no such layout, or no such reduction of this dtype
    where = ", ".join(repr(tensor._spec) for tensor in given.values())
    try:
        _compare(wanted, _run(call, given), infinite_is_nan)
    except Exception as error:
        return Tried(1, [Failure.of(error, str(call.func), where)])
    return Tried(1, [])


def _try_hostile(call: Recorded, found: BoundCall, mesh_info: MeshInfo) -> Iterator[Tried]:
    """Compare calls with hostile data, for each way in which operands may stay Partial on the first axis."""
    for hostile, op, way in hostile_calls(call, found):
        try:
            wanted, bound = _run(hostile, {}), bound_call(hostile, mesh_info)
        except Exception:
            continue  # the op does not accept this data
        if bound is not None and way in passes(bound.bound, op):
            chosen = ((op, way), *[None] * (len(mesh_info.sizes) - 1))
            yield _try(hostile, bound, mesh_info, chosen, wanted, infinite_is_nan=op in ("sum", "avg"))


def _distributed(call: Recorded, found: BoundCall, mesh_info: MeshInfo, wanted: list[Layout]) -> dict[Place, DTensor]:
    made: dict[Place, DTensor] = {}
    for number, (place, layout) in enumerate(zip(found.places, wanted, strict=True)):
        tensor = call.at(place)
        if isinstance(tensor, Tensor) and (tensor.dim() or layout.partial):
            averaged = any(op == "avg" for _, op in layout.partial)
            if averaged and not bool((tensor.to(torch.complex128).abs() < AVERAGED).all()):
                raise ShardwiseError("the average of such large numbers overflows")
            spec = DTensorSpec.from_layout(mesh_info, layout, contiguous_meta(tensor.shape, tensor.dtype))
            made[place] = with_spec(tensor, spec, seed=number)
    if not made:
        raise ShardwiseError("no operand to distribute")
    for argument in tensor_arguments(call.func):
        value = call.kwargs.get(argument.name) if argument.out else None
        if isinstance(value, Tensor):
            spec = DTensorSpec(
                mesh_info.mesh, [Replicate()] * len(mesh_info.sizes), contiguous_meta(value.shape, value.dtype)
            )
            made[argument.name, None] = with_spec(value, spec, seed=0)
    return made


def _run(call: Recorded, given: dict[Place, DTensor]) -> list[object]:
    """Return the results of a call, and its arguments after the call; those in `given` are distributed."""

    def own(place: Place, value: object) -> object:
        return given.get(place, value.clone() if isinstance(value, Tensor) else value)

    args, kwargs = call.replaced(own)
    with torch.no_grad():
        return pytree.tree_leaves((call.func(*args, **kwargs), args, kwargs))


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the relative and absolute tolerance for sums in another order."""
    return (5e-2, 5e-2) if dtype in HALF else (1e-4, 1e-5)


def _compare(wanted: list[object], found: list[object], infinite_is_nan: bool = False) -> None:
    for want, have in zip(wanted, found, strict=True):
        if not isinstance(want, Tensor):
            assert want == have or want != want, f"{have!r} instead of {want!r}"
            continue
        assert isinstance(have, Tensor), f"{have!r} instead of a tensor"
        value = assemble(have) if isinstance(have, DTensor) else have
        rtol, atol = tolerances(want.dtype)
        if infinite_is_nan:
            value, want = _without_infinities(value), _without_infinities(want)
        torch.testing.assert_close(value, want, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)


def _without_infinities(tensor: Tensor) -> Tensor:
    """Return a tensor with NaN in place of infinities."""
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return tensor.where(tensor.isfinite(), torch.nan) if has_nan else tensor
