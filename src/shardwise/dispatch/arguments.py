"""The arguments of a call: how planning sees them, and how a plan treats them.

A plan has a treatment for each argument, which says what to pass to the local call: the argument unchanged (None), its
local shard (LOCALIZE), its local shard under another spec (a DTensorSpec), a constant of the plan (a Constant), or a
list of treatments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .._torch.above_autograd import tensors_in
from .._torch.ops import OpOverload
from .._torch.symbols import has_symbols
from ..errors import InputError, MeshError
from ..ops.call import Args as Args
from ..ops.call import Kwargs as Kwargs
from ..ops.resolve import ResolvedOp
from ..sharding.base import DTensorBase
from ..sharding.memory_order import meta_of
from ..sharding.mesh import MeshInfo
from ..sharding.spec import DTensorSpec, TensorMeta
from .gather_cache import redistributed

Where = int | str
"""The place of an argument: its position, or its name where it was passed by name."""


class Constant(NamedTuple):
    """An argument that the plan replaces by a constant: the local size of this rank."""

    value: object


class Localize:
    """Marks an argument whose local shard is passed."""


LOCALIZE = Localize()
LOCALIZE_LIST = Localize()
"""The mark of a list of distributed tensors whose local shards are passed."""

Treatment = Any
"""None, LOCALIZE, LOCALIZE_LIST, a DTensorSpec, a Constant, or a list of treatments."""


class Argument(NamedTuple):
    """A tensor argument as planning sees it: its meta, and its spec where it is distributed."""

    meta: TensorMeta
    spec: DTensorSpec | None


def as_argument(value: object) -> object:
    """Return a value for planning: tensors become `Argument`s, in lists as well."""
    if isinstance(value, DTensorBase):
        return Argument(value._spec.tensor_meta, value._spec)
    if isinstance(value, Tensor):
        return Argument(meta_of(value), None)
    if isinstance(value, (list, tuple)):
        return [as_argument(element) for element in value]
    return value


def localize(value: Any, how: Treatment) -> Any:
    """Return what to pass to the local call for this argument."""
    if how is None:
        return value
    if how is LOCALIZE:
        return value._local_shard
    if type(how) is DTensorSpec:
        return redistributed(value, how)
    if type(how) is Constant:
        return how.value
    if how is LOCALIZE_LIST:
        return [tensor._local_shard for tensor in value]
    return [localize(element, its) for element, its in zip(value, how, strict=True)]


# ---- all arguments of a call --------------------------------------------------------------------------------------


def distributed(args: Args, kwargs: Kwargs) -> list[DTensorBase]:
    """Return the distributed tensors among the arguments, those in lists included."""
    return [tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, DTensorBase)]


def specialize(tensors: Sequence[DTensorBase]) -> bool:
    """Replace symbolic sizes by numbers: the graph is then valid for these alone. Return whether there were any."""
    found = [tensor for tensor in tensors if has_symbols(tensor._spec.tensor_meta)]
    for tensor in found:
        tensor._spec = tensor._spec.specialized()
    return bool(found)


def common_mesh(func: OpOverload, tensors: Sequence[DTensorBase]) -> MeshInfo:
    """Return the common mesh of these tensors; raise an error if they differ."""
    found = {tensor._spec.mesh_info: None for tensor in tensors}
    if len(found) > 1:
        specs = ", ".join(f"{tensor._spec!r} on {tensor._spec.mesh_info!r}" for tensor in tensors)
        raise MeshError(
            f"{func} on tensors of different meshes: {specs}",
            "bring them to one mesh first: x.redistribute(mesh, placements)",
        )
    return next(iter(found))


class Written(list[Any]):
    """A list of tensors that a call writes. Membership is by identity: == on tensors compares values."""

    def __contains__(self, value: object) -> bool:
        return any(value is mine for mine in self)


def plain_target_error(func: OpOverload, shape: Sequence[int], specs: Iterable[DTensorSpec]) -> InputError:
    """Return the error for a result of operands with these specs that would be written into a plain tensor."""
    operands = ", ".join(dict.fromkeys(map(repr, specs)))
    return InputError(
        f"{func} would write the distributed result of {operands} into a plain tensor of shape {list(shape)}",
        "distribute that tensor first, distribute_tensor(tensor, mesh, placements), or write the global value, "
        "x.full_tensor(), into it",
    )


def written_arguments(op: ResolvedOp, args: Args, kwargs: Kwargs) -> Written:
    """Return the tensors that a call writes."""
    written = Written()
    for position in op.writes:
        value = args[position] if position < len(args) else kwargs.get(op.names[position])
        written.extend(value if isinstance(value, (list, tuple)) else [value])
    return written


def named_tensors(op: ResolvedOp, args: Args, kwargs: Kwargs) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the arguments with their names in the schema: `("other", y)`, `("tensors[0]", x)`."""
    for name, value in [*zip(op.names, args, strict=False), *kwargs.items()]:
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for index, element in enumerate(value):
                if isinstance(element, Tensor):
                    yield f"{name}[{index}]", element


def replace_tensors(op: ResolvedOp, args: Args, kwargs: Kwargs, new: Mapping[str, Tensor]) -> tuple[Args, Kwargs]:
    """Return the arguments with the tensors in `new` in the place of those that `named_tensors` gives their names."""

    def replaced(name: str, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [new.get(f"{name}[{i}]", element) for i, element in enumerate(value)]
        return new.get(name, value)

    return tuple(map(replaced, op.names, args)), {name: replaced(name, value) for name, value in kwargs.items()}
