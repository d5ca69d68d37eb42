"""Records of ops: their rules parse, and rules of a user go on top of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise
from shardwise import DTensor, Partial, Placement, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.extend import register_sharding
from shardwise.notation import parse
from shardwise.ops.call import Call
from shardwise.ops.op import Op
from shardwise.ops.registry import Registry, registry, resolve
from shardwise.ops.schema import overloads
from tests.ops.helpers import on, r, ranks, whole

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with registry.restored():
        yield


def test_every_text_rule_parses_and_names_the_kernels_of_its_record() -> None:
    texts = {name: registry[name] for name in registry if isinstance(registry[name].rule, str)}
    assert len(texts) > 90
    for name, op in texts.items():
        named = {re.sub(r"\d+$", "", factor) for factor in parse(str(op.rule)).kernel}
        assert named == set(op.kernels), name


def test_every_record_names_an_op_and_the_file_that_defines_it() -> None:
    for name in registry:
        if registry[name].origin == "user":  # of another test
            continue
        packet, _, overload = name.partition(".")
        found = list(overloads(packet))
        # PyTorch may lack an op; it may not lack one overload of an op that it has.
        assert not found or not overload or overload in {func._overloadname for func in found}, name
        assert registry[name].file.startswith("ops/"), name


def test_an_op_is_defined_once() -> None:
    table = Registry()
    table.define(Op("aten::mm", "m k, k n -> m n", file="ops/one.py"))
    with pytest.raises(shardwise.rules.RuleError, match=r"aten::mm is defined in ops/one\.py and in ops/two\.py"):
        table.define(Op("aten::mm", file="ops/two.py"))


# ---- the record of an overload --------------------------------------------------------------------------------------


def test_an_overload_takes_its_own_record_and_nothing_of_its_ops() -> None:
    table = Registry()
    table.define(Op("aten::sum", "x.. -> x..", decomposition=print, takes_empty=True))
    table.define(Op("aten::sum.dim_IntList", "x.. -> x.."))
    of_all, own, out = (table.resolve(f) for f in (aten.sum.default, aten.sum.dim_IntList, aten.sum.IntList_out))
    assert (of_all.decomposition, own.decomposition, out.decomposition) == (print, None, None)
    assert (of_all.op.takes_empty, own.op.takes_empty) == (True, False)


def test_out_overloads_and_variants_do_not_inherit_decompositions() -> None:
    assert resolve(aten.histc.default).decomposition is not None
    assert resolve(aten.histc.out).decomposition is None
    assert resolve(aten.histc.out).op is resolve(aten.histc.default).op
    assert resolve(aten.squeeze.dim).put is not None
    assert resolve(aten.squeeze_.dim).put is None


def test_patterns_are_asked_for_ops_without_a_record_only() -> None:
    table = Registry()
    asked = []
    table.define(Op("aten::sin", decomposition=print))
    table.define(Op("aten::add", "b?.., b?.. -> b.."))
    table.add_pattern(lambda func: asked.append(func) or Op(str(func), "x.. -> x.."))
    assert not table.resolve(aten.sin.default).has_rule
    assert table.resolve(aten.add_.Tensor).key == "aten::add"
    assert asked == []
    assert table.resolve(aten.cos.default).has_rule
    assert asked == [aten.cos.default]


@pytest.mark.parametrize("size", [2, 4])
def test_copies_of_views_as_another_dtype(size: int) -> None:
    dtype = {2: torch.int16, 4: torch.int32}[size]
    x = r(8, 6)
    with ranks(4) as mesh:
        for placement in (Shard(0), Shard(1), Replicate()):
            found = aten.view_copy.dtype(on(mesh, x, placement), dtype)
            assert torch.equal(shardwise.world.common(found.full_tensor()), x.view(dtype))


# ---- rules of a user ------------------------------------------------------------------------------------------------

Case = tuple[Callable[..., Any], tuple[Any, ...]]
ROWS = torch.tensor([[0, 4, 2], [1, 0, 3]])
CASES: list[Case] = [
    (aten.mm.default, (r(5, 6), r(6, 7))),
    (aten.bmm.default, (r(2, 5, 6), r(2, 6, 7))),
    (aten.addmm.default, (r(7), r(5, 6), r(6, 7))),
    (aten.mv.default, (r(5, 6), r(6))),
    (aten.add.Tensor, (r(5, 6), r(6))),
    (aten.mul.Tensor, (r(5, 6), r(5, 1))),
    (aten.maximum.default, (r(5, 6), r(5, 6, seed=1))),
    (aten.relu.default, (r(5, 6),)),
    (aten.sum.dim_IntList, (r(5, 6), [1])),
    (aten.mean.dim, (r(5, 6), [0])),
    (aten.mean.default, (r(5, 6),)),
    (aten.amax.default, (r(5, 6), [1])),
    (aten.prod.dim_int, (r(5, 6), 0)),
    (aten.var.correction, (r(5, 6), [0])),
    (aten.linalg_vector_norm.default, (r(5, 6), 2, [1])),
    (aten.argmax.default, (r(5, 6), 1)),
    (aten.max.dim, (r(5, 6), 0)),
    (aten.cumsum.default, (r(5, 6), 1)),
    (aten.cummax.default, (r(5, 6), 0)),
    (aten.topk.default, (r(5, 6), 2, 1)),
    (aten.sort.default, (r(5, 6), 1)),
    (aten._softmax.default, (r(5, 6), 1, False)),
    (aten.native_layer_norm.default, (r(5, 6), [6], r(6), r(6, seed=1), 1e-5)),
    (aten.embedding.default, (r(5, 6), ROWS)),
    (aten.gather.default, (r(5, 6), 0, ROWS)),
    (aten.index_select.default, (r(5, 6), 0, ROWS[0])),
    (aten.view.default, (r(4, 6), [2, 2, 6])),
    (aten.transpose.int, (r(5, 6), 0, 1)),
    (aten.slice.Tensor, (r(5, 6), 0, 1, 4)),
    (aten.select.int, (r(5, 6), 1, 2)),
    (aten.split.Tensor, (r(5, 6), 2, 1)),
    (aten.roll.default, (r(5, 6), [2], [0])),
    (aten.flip.default, (r(5, 6), [1])),
    (aten.constant_pad_nd.default, (r(5, 6), [1, 2])),
    (aten.tril.default, (r(5, 6),)),
    (aten.linear.default, (r(2, 5, 6), r(7, 6), r(7))),
    (aten.nll_loss_forward.default, (r(5, 6).log_softmax(1), torch.tensor([0, 5, 2, -100, 1]), None, 1, -100)),
]


def placements_of(tensor: Tensor) -> list[Placement]:
    if not tensor.is_floating_point():
        return [Replicate()]
    return [Replicate(), *(Shard(dim) for dim in range(tensor.dim())), Partial()]


def outcomes(func: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Placements and local shards of all results, for a sample of the placements of all operands."""
    found = []
    with ranks(4) as mesh:
        tensors = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        combinations = list(itertools.product(*(placements_of(args[i]) for i in tensors)))
        for combination in combinations[:: max(1, len(combinations) // 8)]:
            given = dict(zip(tensors, combination, strict=True))
            made = [on(mesh, value, given[i]) if i in given else value for i, value in enumerate(args)]
            results = func(*made)
            for result in results if isinstance(results, (tuple, list)) else [results]:
                if isinstance(result, DTensor):
                    found.append((result.placements, result.shape, [s.clone() for s in result._local_tensor.shards]))
    return found


@pytest.mark.parametrize(("func", "args"), CASES, ids=[str(case[0]) for case in CASES])
def test_registering_the_built_in_rule_changes_nothing(func: Any, args: tuple[Any, ...]) -> None:
    found = resolve(func)
    before = outcomes(func, args)
    rule = found.rule(Call.make(func, args, {}, found.operands))
    register_sharding(func, str(rule))
    assert resolve(func).op.origin == "user"
    after = outcomes(func, args)
    assert len(before) == len(after) > 0
    for (placements, shape, shards), (new_placements, new_shape, new_shards) in zip(before, after, strict=True):
        assert (placements, shape) == (new_placements, new_shape)
        for one, other in zip(shards, new_shards, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_rule_registered_after_a_call_changes_the_next_call() -> None:
    x, y = r(4, 8), r(8, 4)
    with ranks(4) as mesh:
        a, b = on(mesh, x, Shard(1)), on(mesh, y, Shard(0))
        for _ in range(3):
            assert torch.mm(a, b).placements == (Partial(),)
        register_sharding(aten.mm.default, "m [k], [k] n -> m n")
        product = torch.mm(a, b)
        assert product.placements != (Partial(),)
        assert torch.allclose(shardwise.world.common(product.full_tensor()), x @ y, atol=1e-5)
    with ranks(4) as mesh:
        assert torch.mm(on(mesh, x, Shard(1)), on(mesh, y, Shard(0))).placements != (Partial(),)


def test_kernels_are_taken_from_the_built_in_record_of_the_op() -> None:
    register_sharding(aten.cumsum.default, "x0 k1 -> x0 k1 ; kernel k1")
    found = resolve(aten.cumsum.default)
    assert found.kernel("k1") is found.built_in.kernel("k")
    with pytest.raises(shardwise.rules.RuleError, match=r"aten::mm\.default has kernels for nothing"):
        register_sharding(aten.mm.default, "m k, k n -> m n ; kernel k")


REGISTERED: dict[str, Callable[[DTensor], DTensor]] = {
    "mean": lambda x: x.mean(1),
    "roll": lambda x: x.roll(3, 0),
    "cumprod": lambda x: x.cumprod(0),
    "split": lambda x: x.split(3)[1],
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "embedding": lambda x: F.embedding(x.detach().abs().long().clamp(max=7), x),
    "dropout": lambda x: F.dropout(x, 0.5),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()], ids=str)
def test_registering_built_in_rules_changes_nothing(placement: Placement) -> None:
    def calls(mesh: DeviceMesh) -> list[object]:
        found: list[object] = []
        for call in REGISTERED.values():
            torch.manual_seed(0)
            x = on(mesh, r(8, 8), placement, grad=True)
            with CommDebugMode() as comm:
                result = call(x)
                (gradient,) = torch.autograd.grad(result.square().sum(), x)
            found.append((result._spec, whole(result).tolist(), whole(gradient).tolist(), comm.get_comm_counts()))
        return found

    with ranks(4) as mesh:
        expected = calls(mesh)
        for name in registry:
            rule = registry[name].rule
            if rule is not None:
                registry.register(name, rule)
        for name, one, other in zip(REGISTERED, calls(mesh), expected, strict=True):
            assert one == other, name
