"""Binding a call: the op's rule with the sizes of this call's tensors, and the layouts its operands have now.

Planning chooses among what the bound call allows, and the verifier in `shardwise.testing` tries all of it.

>>> x = Argument(contiguous_meta((4, 6)), spec)  # sharded along dim 0
>>> found = bind_call(resolve(torch.ops.aten.sum.default), [x], {}, spec.mesh_info)
>>> found.bound, found.operands[0].layout
(x0=4 x1=6: x0 x1 -> ; linear 0, Layout[4@0, 6])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.ops import OpOverload
from .._torch.symbols import symbolic
from ..notation import BindError, Bound, BoundTensor, Rule, bind, refine, without_order
from ..ops.call import Call, is_list
from ..ops.resolve import ResolvedOp
from ..ops.schema import has_functional_variant
from ..sharding.dtypes import sums_alike
from ..sharding.layout import Layout, Sizes, plain_dim
from ..sharding.mesh import MeshInfo
from ..sharding.spec import TensorMeta
from ..world.rank_int import refuse_differing
from .arguments import Argument, Where
from .decision import Operand, Result
from .local_call import tensors_in
from .result_meta import (
    NoRule,
    cache_form,
    cached_results,
    form_key,
    requested_results,
    result_metas,
    results_without_out,
    with_dtypes,
    with_real_dtypes,
)
from .result_strides import with_real_strides

Place = tuple[Where, int | None]
"""Where an operand is: its argument, and its index if the argument is a list of tensors."""

Metas = tuple[list[object], dict[str, object]]
"""The arguments of a call with a `TensorMeta` for each tensor."""

NO_LISTS: frozenset[Where] = frozenset()
"""The `lists` of a call that is no element of an op on lists (see `bind_call`)."""

NUMBER = Argument(TensorMeta(torch.Size(), (), torch.float64), None)
"""What planning sees of a number that is passed where the op takes a tensor."""


class BoundCall(NamedTuple):
    """A call with its op's rule bound to the shapes of its tensors, and what propagation needs to know of them."""

    resolved: ResolvedOp
    call: Call
    metas: Metas
    rule: Rule
    bound: Bound
    """Refined: factors are split where the layout of an operand splits their dim."""
    operands: list[Operand]
    places: list[Place]
    """One for each operand."""
    outputs: object
    """The results of the op as meta tensors, in the structure in which it returns them."""
    results: list[Result]
    written: list[Where]
    """The arguments that the call writes."""


def bind_call(
    resolved: ResolvedOp,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    mesh_info: MeshInfo,
    lists: frozenset[Where] = NO_LISTS,
) -> BoundCall:
    """Bind a call whose tensors are given as `Argument`s. Raises `NoRule` if the op has no rule for this call.

    For one element of an op on lists, `lists` names the arguments that are lists in the op's schema; `args` and
    `kwargs` hold what they contain for this element.
    """
    return _Binding(resolved, args, kwargs, mesh_info, lists).run()


def operand_layout(resolved: ResolvedOp, argument: Argument, mesh_sizes: Sizes) -> Layout:
    """Return the layout of an operand before the call.

    A plain tensor is replicated; for an op that reads only the shapes of its operands, so is a Partial one.
    """
    if argument.spec is not None:
        layout = argument.spec.layout
        return layout.without_partial() if resolved.op.reads_shape_only else layout
    return Layout.make(mesh_sizes, [plain_dim(size, ()) for size in argument.meta.shape])


def element_result(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], lists: frozenset[Where]
) -> Tensor:
    """Return what an op on lists returns for one element, as a meta tensor."""

    def listed(where: Where, value: object) -> object:
        return value if where not in lists else [] if value is None else [value]

    named = {name: listed(name, value) for name, value in kwargs.items()}
    return result_metas(func, [listed(i, value) for i, value in enumerate(args)], named)[0]


class _Binding:
    """The state of `bind_call`."""

    def __init__(
        self,
        resolved: ResolvedOp,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        mesh_info: MeshInfo,
        lists: frozenset[Where],
    ) -> None:
        self.func, self.args, self.kwargs, self.mesh_info, self.lists = resolved.func, args, kwargs, mesh_info, lists
        self.metas: Metas = [_meta_of(value) for value in args], {n: _meta_of(v) for n, v in kwargs.items()}
        self.call = Call.make(self.func, *self.metas, resolved.operands)
        self.resolved = resolved.at(self.call)
        self.written = self._written()

    def run(self) -> BoundCall:
        resolved = self.resolved
        self._refuse_data_dependent()
        self._refuse_differing_sizes()
        self._refuse_other_out()
        key = form_key(resolved, *self.metas)
        cached = cached_results(resolved, key, resolved.tensors(self.call))
        self.outputs = self._outputs() if cached is None else cached
        self._refuse_broadcast_target()
        rule = resolved.rule(self.call)
        if rule is None:
            raise NoRule(f"{self.func} has no rule for this call")
        try:
            self.bound = self._bind(rule)
        except BindError as error:
            self._outputs()  # for shapes that do not fit, the op itself has the better error
            raise NoRule(f"the rule of {self.func} does not fit the shapes of this call") from error
        if cached is None:
            cache_form(resolved, key, self.bound, self.outputs)
        if resolved.op.cpu_dtypes is not None and self.mesh_info.device_type == "cpu":
            self.outputs = with_dtypes(self.outputs, resolved.op.cpu_dtypes(self.call))
        operands, places = self._operands()
        by_layout = resolved.layout_rule(self.call, [operand.layout for operand in operands])
        if by_layout is not None:
            rule = by_layout
            self.bound = self._bind(rule)
            operands, places = self._operands()
        results = self._results()
        layouts = [(operand.tensor, operand.layout) for operand in operands]
        goals = [(result.tensor, result.fixed or result.wanted) for result in results]
        layouts += [(tensor, layout) for tensor, layout in goals if layout is not None]
        refined = refine(self.bound, layouts, lambda name: resolved.kernel(name).anywhere)
        if refined is not self.bound:
            self.bound = refined
            operands, places = self._operands()
            results = self._results()
        return BoundCall(
            resolved,
            self.call,
            self.metas,
            rule,
            self.bound,
            operands,
            places,
            self.outputs,
            results,
            self.written,
        )

    def _refuse_data_dependent(self) -> None:
        """Raise `NoRule` if the shapes of the results depend on data."""
        resolved = self.resolved
        # Only a rule that is computed from the call can know that the results of this call do not.
        if resolved.needs_data and (not callable(resolved.op.rule) or resolved.rule(self.call) is None):
            raise NoRule(f"the result of {self.func} depends on data")

    def _refuse_differing_sizes(self) -> None:
        """Raise an error if a size or an index of the call differs between simulated ranks."""
        for name, value in self.call.arguments.items():
            if name in self.resolved.size_arguments:
                refuse_differing(f"{name} of {self.func}", value if is_list(value) else (value,))

    def _refuse_other_out(self) -> None:
        """Raise `NoRule` if a result does not fit the `out=` tensor that it is written to, which is then resized."""
        if self.resolved.variant != "out" or not has_functional_variant(self.func):
            return
        args, kwargs = self.metas
        named = {name: value for name, value in kwargs.items() if name not in self.written}
        try:
            results = results_without_out(self.func, args, named)
        except Exception as error:
            raise NoRule(f"{self.func} raises an error for these arguments without out=, too") from error
        for where, result in zip(self.written, tensors_in(results), strict=False):
            target = self._at(where)
            if target.spec is None or (result.shape, result.dtype) != (target.meta.shape, target.meta.dtype):
                raise NoRule(f"a result of {self.func} does not fit its out= tensor")

    def _refuse_broadcast_target(self) -> None:
        """Raise an error if a result is larger than the tensor that the op writes in place."""
        if self.resolved.variant != "inplace" or self.lists:
            return
        for where, result in zip(self.written, tensors_in(self.outputs), strict=False):
            shape = self._at(where).meta.shape
            if result.shape != shape:
                problem = f"shape {list(shape)} doesn't match the broadcast shape {list(result.shape)}"
                raise RuntimeError(f"output with {problem}")

    def _written(self) -> list[Where]:
        """Return the arguments that are written, without those that were not passed."""
        places = [p if p < len(self.args) else self.resolved.names[p] for p in self.resolved.writes]
        given = [(where, self._at(where)) for where in places]
        tensors = [(where, value) for where, value in given if isinstance(value, Argument)]
        if self.lists:
            # Plain tensors in other lists than the first, such as an optimizer's step counts, stay plain: all ranks
            # write the same values into them.
            tensors = [(where, value) for where, value in tensors if where == 0 or value.spec is not None]
        return [where for where, _ in tensors]

    def _at(self, where: Where) -> Any:
        return self.args[where] if isinstance(where, int) else self.kwargs.get(where)

    def _outputs(self) -> object:
        if self.written and not self.resolved.returns:
            # The results of an op that returns nothing are what it writes; not all such ops have meta kernels.
            metas = [self._at(where).meta for where in self.written]
            return tuple(torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta") for m in metas)
        if self.lists and self.resolved.returns:
            return element_result(self.func, *self.metas, self.lists)
        outputs = with_real_dtypes(self.resolved, *self.metas, result_metas(self.func, *self.metas))
        if self.resolved.op.masks_results:
            outputs = requested_results(outputs, self.call.arg("output_mask"))
        return with_real_strides(self.resolved, *self.metas, outputs)

    def _bind(self, rule: Rule) -> Bound:
        if any(tensor.is_complex() for tensor in tensors_in(self.outputs)):
            rule = without_order(rule)
        shapes = [_shapes(tensor) for tensor in self.resolved.tensors(self.call)]
        flat = self.outputs if isinstance(self.outputs, (tuple, list)) else (self.outputs,)
        if len(rule.outputs) == 1 and rule.outputs[0].listed:
            flat = (flat,)
        outputs = [_shapes(value) for value in flat if not isinstance(value, (int, float))]
        arg = self.call.arg
        sizes = {a.name: arg(a.name) for a in rule.size_arguments if arg(a.name, None) is not None}
        bound = bind(rule, shapes, outputs[: len(rule.outputs)], sizes or None)
        reduced_first = self._reduced_first() if bound.linear else None
        return bound._replace(reduced_first=reduced_first) if reduced_first else bound

    def _reduced_first(self) -> frozenset[int]:
        """Return the operands whose Partial sums are reduced before the call.

        Such an operand has a result of a dtype in which the sum would differ (`sums_alike`).
        """
        results = {tensor.dtype for tensor in tensors_in(self.outputs)}
        found: set[int] = set()
        for position, value in enumerate(self.resolved.tensors(self.call)):
            for tensor in value if is_list(value) else (value,):
                dtype = getattr(tensor, "dtype", None)
                if dtype is None or results == {dtype}:
                    continue
                if not all(sums_alike(dtype, result) for result in results):
                    found.add(position)
        return frozenset(found)

    def _operands(self) -> tuple[list[Operand], list[Place]]:
        operands: list[Operand] = []
        places: list[Place] = []
        if self.bound.rule.unread:
            return operands, places
        positions = [p for p in self.resolved.operands if p is not None]
        for position, (schema_position, bound) in enumerate(zip(positions, self.bound.inputs, strict=True)):
            in_args = schema_position < len(self.args)
            where = schema_position if in_args else self.resolved.names[schema_position]
            value = self._at(where)
            tensors: list[tuple[object, BoundTensor | None, int | None]] = [(value, bound, None)]
            if isinstance(bound, tuple) and not isinstance(bound, BoundTensor):
                tensors = [(e, tensor, i) for i, (e, tensor) in enumerate(zip(value or (), bound, strict=True))]
            for element, tensor, index in tensors:
                if tensor is not None:
                    argument = element if isinstance(element, Argument) else NUMBER
                    layout = operand_layout(self.resolved, argument, self.mesh_info.sizes)
                    itemsize, plain = argument.meta.dtype.itemsize, argument.spec is None
                    operands.append(Operand(position, tensor, layout, itemsize, plain))
                    places.append((where, index))
        return operands, places

    def _results(self) -> list[Result]:
        written = [self._at(where) for where in self.written]
        flat = self.outputs if isinstance(self.outputs, (tuple, list)) else (self.outputs,)
        metas = [value for value in flat if isinstance(value, Tensor)]
        results: list[Result] = []
        for index, bound in enumerate(self.bound.outputs):
            for tensor in bound if isinstance(bound, tuple) and not isinstance(bound, BoundTensor) else (bound,):
                if tensor is None:
                    continue
                number = len(results)
                fixed = written[number].spec.layout if number < len(written) and written[number].spec else None
                results.append(Result(index, tensor, metas[number].dtype.itemsize, fixed, self._wanted()))
        return results

    def _wanted(self) -> Layout | None:
        """Return the layout to which a gradient is redistributed later, that of its tensor's cotangent.

        Return None for results that are no gradients.
        """
        name = self.resolved.op.gradient_of
        tensor = None if name is None else self._at(self.resolved.names.index(name))
        return tensor.spec.cotangent().layout if isinstance(tensor, Argument) and tensor.spec is not None else None


def _meta_of(value: object) -> object:
    if isinstance(value, Argument):
        return value.meta
    if isinstance(value, (list, tuple)):
        return [_meta_of(element) for element in value]
    return value


def _shapes(value: Any) -> object:
    """Return the shape of a tensor or number, the shapes of a list of them, or None for a missing one."""
    if value is None:
        return None
    if isinstance(value, (int, float, complex, torch.SymInt, torch.SymFloat)):
        return ()
    if isinstance(value, TensorMeta):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return [_shapes(element) for element in value]
    return symbolic(tuple(value.shape))
