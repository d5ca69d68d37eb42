"""Calls of single ops: recorded while a function runs, then tried with every placement that the op's rule allows.

>>> calls = recorded(torch.nn.functional.linear, (x, weight), {})
>>> [str(call.func) for call in calls]
['aten.t.default', 'aten.mm.default', ...]
>>> try_call(calls[1], (2,))
Tried(cases=4, failures=[])

The functions of users meet a rule with the placements that the propagator chooses for them. Here the operands come
just as a rule wants them: cut along one of its factors, or Partial where it says that Partial may pass.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .._torch import pytree
from .._torch.modes import TorchDispatchMode
from .._torch.ops import OpOverload
from ..comm.groups import adopt
from ..dispatch.arguments import Argument
from ..dispatch.bind_call import BoundCall, bind_call
from ..dispatch.bind_call import Place as Where
from ..dispatch.result_meta import NoRule
from ..errors import ShardwiseError
from ..notation import Bound, Passing, cut_layout, passes, summands, tensor_arguments
from ..ops.registry import rule_for
from ..sharding.layout import Layout, PartialAxes
from ..sharding.mesh import MeshInfo
from ..sharding.placement import Replicate
from ..sharding.spec import DTensorSpec, TensorMeta, contiguous_meta
from ..tensor.dtensor import DTensor
from ..world import simulate
from .checker import plain_run
from .values import assemble, with_spec

AVERAGED = 1e30  # the largest number that averages are tried with

INDEFINITE = ("empty", "resize")
"""Parts of names of ops whose results are left undefined."""


HALF = (torch.float16, torch.bfloat16, torch.complex32)
"""Sums in these round visibly, in another order otherwise."""


class Recorded(NamedTuple):
    """One call of an op, on plain tensors that are its own."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Failure(NamedTuple):
    """What went wrong: `wrong` numbers or an `error`, of which op, with which operands."""

    kind: str
    op: str
    where: str
    text: str


class Tried(NamedTuple):
    """How many placements of a call were compared, and those that failed."""

    cases: int
    failures: list[Failure]


def call_key(func: OpOverload, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What tells calls apart that a rule may treat differently."""
    return func, str(pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), (args, kwargs)))


class Recorder(TorchDispatchMode):
    """Notes each op that is called, and whether any of them draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Recorded] = {}
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.draws |= _draws(func, kwargs)
        key = call_key(func, args, kwargs)
        if key not in self.calls:
            own = pytree.tree_map_only(Tensor, lambda t: t.detach().clone().contiguous(), (args, kwargs))
            self.calls[key] = Recorded(func, *own)
        return func(*args, **kwargs)


def _draws(func: OpOverload, kwargs: dict[str, Any]) -> bool:
    # The checker's own weights come from a generator of their own; attention draws for dropout, which is off.
    seeded = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    return seeded and "attention" not in func._schema.name


def recorded(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], grad: bool = True) -> list[Recorded] | None:
    """The ops that a function and its backward call, each shape of each once; None if it draws random numbers."""
    with Recorder() as recorder:
        plain_run(fn, args, kwargs, grad, 0)
    if recorder.draws:
        return None
    return [call for call in recorder.calls.values() if _is_definite(call)]


def _is_definite(call: Recorded) -> bool:
    tensors = [value for value in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(value, Tensor)]
    return bool(tensors) and not any(part in call.func._schema.name for part in INDEFINITE)


# ---- a rule bound to a call -----------------------------------------------------------------------------------------


def bound_call(call: Recorded, mesh_info: MeshInfo) -> BoundCall | None:
    """Bind a call as dispatch does. None if the op has no rule for it, or is an op on lists."""
    resolved = rule_for(call.func)
    if resolved is None or resolved.variant == "foreach":
        return None
    args, kwargs = pytree.tree_map_only(Tensor, _argument, (call.args, call.kwargs))
    try:
        return bind_call(resolved, args, kwargs, mesh_info)
    except NoRule:
        return None


def _argument(tensor: Tensor) -> Argument:
    return Argument(TensorMeta(tensor.shape, tensor.stride(), tensor.dtype), None)


# ---- the placements it allows ---------------------------------------------------------------------------------------

Option = int | tuple[str, Passing] | None
"""What an axis does: cut a factor, hold operands as Partial by an op, or nothing."""


def allowed(bound: Bound, mesh_sizes: tuple[int, ...], limit: int, seed: int) -> Iterator[tuple[Option, ...]]:
    """What each axis may do, for all axes together; a sample of them if there are more than `limit`."""
    options = []
    for size in mesh_sizes:
        cuts: list[Option] = [
            index
            for index, factor in enumerate(bound.factors)
            if not factor.must_replicate
            and not (factor.even and factor.size % math.prod(mesh_sizes))
            and factor.size
            and size
        ]
        passing: list[Option] = [(op, way) for op in ("sum", "avg", "max", "min") for way in passes(bound, op)]
        options.append([*cuts, *passing, *([None] if len(mesh_sizes) > 1 else [])])
    everything = list(itertools.product(*options))
    if len(everything) > limit:
        everything = random.Random(f"{seed} {bound!r} {mesh_sizes}").sample(everything, limit)
    yield from everything


def layouts(found: BoundCall, mesh_sizes: tuple[int, ...], chosen: Sequence[Option]) -> list[Layout]:
    """How each operand then is laid out."""
    cuts = tuple((axis, option) for axis, option in enumerate(chosen) if isinstance(option, int))
    result = []
    for operand in found.operands:
        partial: list[tuple[int, str]] = []
        for axis, option in enumerate(chosen):
            if isinstance(option, tuple) and operand.position in option[1].operands:
                partial.append((axis, option[0]))
            elif isinstance(option, int) and operand.position in summands(found.bound, option):
                partial.append((axis, "sum"))
        axes: PartialAxes = tuple(partial)
        result.append(cut_layout(operand.tensor, found.bound, mesh_sizes, cuts, axes))
    return result


# ---- trying them ----------------------------------------------------------------------------------------------------


def try_call(call: Recorded, mesh_sizes: tuple[int, ...], limit: int = 12, seed: int = 0) -> Tried:
    """The call with every placement that its rule allows on a mesh, compared with the plain call."""
    with simulate(math.prod(mesh_sizes)):
        mesh = init_device_mesh("cpu", mesh_sizes)
        mesh_info = adopt(mesh)
        try:
            found = bound_call(call, mesh_info)
        except Exception as error:
            return Tried(1, [_failure("error", call, "binding its rule", error)])
        if found is None:
            return Tried(0, [])
        try:
            wanted = _run(call, {})
        except Exception:
            return Tried(0, [])  # an op on memory that only the program's own tensors have
        cases, failures = 0, []
        for chosen in allowed(found.bound, mesh_sizes, limit, seed):
            try:
                given = _distributed(call, found, mesh_info, layouts(found, mesh_sizes, chosen))
            except ShardwiseError:
                continue  # no such cut, or no such reduction of this dtype
            cases += 1
            where = ", ".join(repr(tensor._spec) for tensor in given.values())
            try:
                _compare(wanted, _run(call, given))
            except AssertionError as error:
                failures.append(_failure("wrong", call, where, error))
            except Exception as error:
                failures.append(_failure("error", call, where, error))
        return Tried(cases, failures)


def _failure(kind: str, call: Recorded, where: str, error: Exception) -> Failure:
    return Failure(kind, str(call.func), where, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _distributed(call: Recorded, found: BoundCall, mesh_info: MeshInfo, wanted: list[Layout]) -> dict[Where, DTensor]:
    made: dict[Where, DTensor] = {}
    for number, ((where, index), layout) in enumerate(zip(found.places, wanted, strict=True)):
        value = call.args[where] if isinstance(where, int) else call.kwargs[where]
        tensor = value if index is None else value[index]
        if isinstance(tensor, Tensor) and (tensor.dim() or layout.partial):
            averaged = any(op == "avg" for _, op in layout.partial)
            if averaged and not bool((tensor.to(torch.complex128).abs() < AVERAGED).all()):
                raise ShardwiseError("an average of numbers so large overflows")
            spec = DTensorSpec.from_layout(mesh_info, layout, contiguous_meta(tensor.shape, tensor.dtype))
            made[where, index] = with_spec(tensor, spec, seed=number)
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


def _run(call: Recorded, given: dict[Where, DTensor]) -> list[Any]:
    """The results of a call, then its arguments as it leaves them; some arguments may be distributed."""

    def own(where: int | str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [given.get((where, i), _copied(element)) for i, element in enumerate(value)]
        return given.get((where, None), _copied(value))

    args = [own(i, value) for i, value in enumerate(call.args)]
    kwargs = {name: own(name, value) for name, value in call.kwargs.items()}
    with torch.no_grad():
        return pytree.tree_leaves((call.func(*args, **kwargs), args, kwargs))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _compare(wanted: list[Any], found: list[Any]) -> None:
    for want, have in zip(wanted, found, strict=True):
        if not isinstance(want, Tensor):
            assert want == have or want != want, f"{have!r} instead of {want!r}"
            continue
        whole = assemble(have) if isinstance(have, DTensor) else have
        rtol, atol = (5e-2, 5e-2) if want.dtype in HALF else (1e-4, 1e-5)
        torch.testing.assert_close(whole, want, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
