"""Sharding strategies in the form of `torch.distributed.tensor._op_schema`, registered as rules.

A strategy is a function from an `OpSchema`, which holds an `OpStrategy` for each tensor argument, to the `OpStrategy`
of the op: a list of acceptable output and input specs. It is called once for each placement of the inputs, on a mesh of
one axis, and its results become the rows of `shardwise.register_sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.device_mesh import mesh_without_groups
from .._torch.ops import OpOverload, schema_of
from ..errors import InputError
from ..extend.placement_rows import HasMeta, Row, TensorInfo
from ..extend.register import register_sharding
from ..sharding.memory_order import contiguous_meta
from ..sharding.placement import AnyShard, Partial, Placement, Replicate, Shard
from ..sharding.runtime import WorldState, runtime_of_world
from ..sharding.spec import DTensorSpec

PlacementList = list[Placement | None]
ArgsType = tuple[object, ...]
KwargsType = dict[str, object]


@dataclass
class OpSpec:
    """One way to run an op: the specs of its outputs, and those that its inputs must have."""

    output_specs: DTensorSpec | tuple[DTensorSpec | None, ...] | None
    input_specs: Sequence[DTensorSpec] | None = None
    redistribute_cost: list[list[float]] | None = None

    @property
    def output_spec(self) -> DTensorSpec:
        """The spec of the only output."""
        if not isinstance(self.output_specs, DTensorSpec):
            raise InputError(f"output_spec of an OpSpec with {self.output_specs!r}", "read output_specs instead")
        return self.output_specs

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the outputs."""
        first = self.output_specs if isinstance(self.output_specs, DTensorSpec) else (self.output_specs or (None,))[0]
        if first is None:
            raise InputError("an OpSpec without a spec of its first output has no mesh", "give the first output a spec")
        return first.mesh

    def input_spec(self, index: int = 0) -> DTensorSpec:
        """Return the spec that an input must have."""
        if self.input_specs is None:
            raise InputError("input_spec of an OpSpec without input specs", "pass input_specs= to OpSpec")
        return self.input_specs[index]


class StrategyType:
    """Base class of `OpStrategy` and `TupleStrategy`."""


class OpStrategy(StrategyType):
    """The ways to run an op; for an argument, the spec that it has."""

    def __init__(self, strategies: list[OpSpec]) -> None:
        self.strategies = strategies

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.strategies[0].mesh

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes of the mesh's axes."""
        return tuple(self.mesh.shape)

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return self.strategies[0].output_spec.ndim

    @property
    def shape(self) -> torch.Size:
        """The global shape of the tensor."""
        return self.strategies[0].output_spec.shape

    @property
    def tensor_meta(self) -> object:
        """Shape, stride and dtype of the tensor."""
        return self.strategies[0].output_spec.tensor_meta

    def max_num_shards(self) -> int:
        """Return the largest number of shards among the specs."""
        return max(strategy.output_spec.num_shards for strategy in self.strategies)


class TupleStrategy(StrategyType):
    """The strategies of the elements of a list argument."""

    def __init__(self, children: Sequence[StrategyType]) -> None:
        self.children = tuple(children)


@dataclass
class RuntimeSchemaInfo:
    """The arguments that PyTorch's cache keys on. Not used: here every argument is part of a plan's key."""

    static_argnum: int = 100
    static_kwargkey: list[str] | None = None
    needs_pytree: bool = False


@dataclass
class OutputSharding:
    """The specs of an op's outputs, and the redistributed arguments to call it with."""

    output_spec: DTensorSpec | Sequence[DTensorSpec | None] | None
    redistribute_schema: OpSchema | None = None
    needs_redistribute: bool = False


@dataclass
class OpSchema:
    """One call of an op: an `OpStrategy` in the place of each tensor."""

    op: OpOverload
    args_schema: ArgsType
    kwargs_schema: KwargsType = field(default_factory=dict)
    schema_info: RuntimeSchemaInfo | None = None

    @property
    def args_strategy(self) -> tuple[OpStrategy, ...]:
        """The strategies of the positional tensor arguments."""
        return tuple(_strategies(self.args_schema))

    @property
    def kwargs_strategy(self) -> tuple[OpStrategy, ...]:
        """The strategies of the tensor arguments passed by name."""
        return tuple(_strategies(self.kwargs_schema.values()))

    @property
    def args_spec(self) -> tuple[DTensorSpec, ...]:
        """The specs of the positional tensor arguments."""
        return tuple(strategy.strategies[0].output_spec for strategy in self.args_strategy)

    def get_mesh_from_args(self, validate: bool = True) -> DeviceMesh:
        """Return the mesh of the tensor arguments."""
        return (*self.args_strategy, *self.kwargs_strategy)[0].mesh


def _strategies(values: Iterable[object]) -> Iterator[OpStrategy]:
    for value in values:
        if isinstance(value, OpStrategy):
            yield value
        elif isinstance(value, TupleStrategy):
            yield from _strategies(value.children)


# ---- registration ----------------------------------------------------------------------------------------------------

Strategy = Callable[[OpSchema], StrategyType]


def register_op_strategy(
    op: OpOverload | list[OpOverload], schema_info: RuntimeSchemaInfo | None = None
) -> Callable[[Strategy], Strategy]:
    """Register a strategy function as the rule of an op.

    >>> @register_op_strategy(torch.ops.mylib.scale.default)
    ... def scale(op_schema):
    ...     return op_schema.args_schema[0]            # sharded as its input
    """

    def decorate(strategy: Strategy) -> Strategy:
        for each in op if isinstance(op, list) else [op]:
            register_sharding(each)(_rows_of(each, strategy))
        return strategy

    return decorate


_MESH: WorldState[dict[str, DeviceMesh]] = WorldState(dict)


def _one_axis_mesh() -> DeviceMesh:
    """Return a mesh of all ranks on one axis, on which strategies are called for their rows."""
    meshes = _MESH.of(runtime_of_world())
    if "all" not in meshes:
        meshes["all"] = mesh_without_groups("cpu", torch.arange(dist.get_world_size()), None, dist.get_rank())
    return meshes["all"]


def _rows_of(op: OpOverload, strategy: Strategy) -> Callable[..., list[Row]]:
    def rows(*args: object, **kwargs: object) -> list[Row]:
        values = (*args, *kwargs.values())
        dims = max((value.ndim for value in _tensors(values)), default=0)
        found: list[Row] = []
        for placement in (Replicate(), *map(Shard, range(dims)), Partial()):
            placed = [_as_strategy(value, placement) for value in values]
            schema = OpSchema(op, tuple(placed[: len(args)]), dict(zip(kwargs, placed[len(args) :], strict=True)))
            for spec in _strategies([strategy(schema)]):
                found += [row for option in spec.strategies if (row := _row(option, values)) not in found]
        return found

    return rows


def _tensors(values: Sequence[object]) -> Iterator[TensorInfo]:
    for value in values:
        if isinstance(value, TensorInfo):
            yield value
        elif isinstance(value, list):
            yield from _tensors(value)


def _as_strategy(value: object, placement: Placement) -> object:
    if isinstance(value, TensorInfo):
        sharded = isinstance(placement, AnyShard) and placement.dim < value.ndim
        fits = placement if sharded or not isinstance(placement, AnyShard) else Replicate()
        meta = contiguous_meta(value.shape, value.dtype)
        return OpStrategy([OpSpec(DTensorSpec(_one_axis_mesh(), [fits], meta))])
    if isinstance(value, list) and any(isinstance(element, TensorInfo) for element in value):
        return TupleStrategy([_as_strategy(element, placement) for element in value])  # type: ignore[misc]
    return value


def _row(option: OpSpec, values: Sequence[object]) -> Row:
    """Return the placements of outputs and inputs on the one axis; inputs that are not tensors have none."""
    given = option.output_specs
    outputs = [
        None if spec is None else spec.placements[0] for spec in (given if isinstance(given, tuple) else (given,))
    ]
    if option.input_specs is None:  # all inputs are sharded as the output
        specs = iter([outputs[0]] * len(values))
    else:
        specs = iter([spec.placements[0] for spec in option.input_specs])
    return outputs, [next(specs, None) if isinstance(value, (TensorInfo, list)) else None for value in values]


def replicate_op_strategy(op_schema: OpSchema) -> OpStrategy:
    """Return the strategy that replicates all inputs and outputs."""
    replicated = [
        DTensorSpec(s.mesh, [Replicate()] * s.mesh.ndim, s.strategies[0].output_spec.tensor_meta)
        for s in (*op_schema.args_strategy, *op_schema.kwargs_strategy)
    ]
    outputs = len(schema_of(op_schema.op).returns)
    return OpStrategy([OpSpec(replicated[0] if outputs == 1 else (replicated[0],) * outputs, replicated)])


def expand_to_full_mesh_op_strategy(
    mesh: DeviceMesh,
    op_schema: OpSchema,
    single_mesh_dim_strategies: list[PlacementList],
    *,
    input_index: int = 1,
    **_: object,
) -> OpStrategy:
    """Return the strategy of rows for one axis: outputs first, then inputs, which start at `input_index`."""
    metas = [s.strategies[0].output_spec.tensor_meta for s in (*op_schema.args_strategy, *op_schema.kwargs_strategy)]
    options = []
    for row in single_mesh_dim_strategies:
        inputs = [
            DTensorSpec(mesh, [placement] * mesh.ndim, meta)
            for placement, meta in zip(row[input_index:], metas, strict=False)
            if placement is not None and _fits(placement, meta)
        ]
        outputs = tuple(None if p is None else DTensorSpec(mesh, [p] * mesh.ndim, metas[0]) for p in row[:input_index])
        options.append(OpSpec(outputs[0] if len(outputs) == 1 else outputs, inputs))
    return OpStrategy(options)


def _fits(placement: Placement, meta: HasMeta) -> bool:
    return not isinstance(placement, AnyShard) or placement.dim < len(meta.shape)


def generate_redistribute_costs(src_strategy: OpStrategy, dst_spec: DTensorSpec) -> list[float]:
    """Return zeros: the planner estimates costs itself."""
    return [0.0] * len(src_strategy.strategies)


def register_inductor_prims() -> None:
    """Does nothing: every op without a rule runs on gathered inputs."""


class ShardingPropagator:
    """Registers strategies as rules, as `register_op_strategy` does. It has no state of its own."""

    _fake_mode_lock: ClassVar[AbstractContextManager[object]] = nullcontext()  # PyTorch's test classes replace it

    def register_op_strategy(
        self, op_overload: OpOverload, strategy_func: Strategy, schema_info: RuntimeSchemaInfo | None = None
    ) -> None:
        """Register a strategy function as the rule of an op."""
        register_op_strategy(op_overload, schema_info)(strategy_func)
