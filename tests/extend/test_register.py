"""register_sharding: rules for custom ops, as one line and in PyTorch's form."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.dispatch.fallback import GatherWarning
from shardwise.errors import InputError
from shardwise.notation import RuleError
from shardwise.ops.kernel import Kernel
from shardwise.ops.registry import registry
from shardwise.testing import assemble, check, make_dtensor


@torch.library.custom_op("shardwise_tests::weighted", mutates_args=())
def weighted(x: Tensor, weight: Tensor) -> Tensor:
    """Rows times weights, summed over the rows."""
    return (x * weight[:, None]).sum(0)


@weighted.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[1])


@torch.library.custom_op("shardwise_tests::weighted_backward", mutates_args=())
def weighted_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight[:, None] * grad, (x * grad).sum(1)


@weighted_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return weighted_backward(grad, *ctx.saved_tensors)


weighted.register_autograd(_backward, setup_context=_save)
OP = torch.ops.shardwise_tests.weighted.default
BACKWARD = torch.ops.shardwise_tests.weighted_backward.default
torch.manual_seed(0)
X, WEIGHT = torch.randn(5, 4), torch.randn(5)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Whatever a test registers is gone afterwards."""
    with registry.restored(), warnings.catch_warnings():
        warnings.simplefilter("error", GatherWarning)
        yield


def placements_of(*given, mesh_size: int = 2):
    """The placements of the result, with no communication allowed."""
    with shardwise.simulate(mesh_size):
        mesh = init_device_mesh("cpu", (mesh_size,))
        x, weight = (
            make_dtensor(t, mesh, [p], seed=i) for i, (t, p) in enumerate(zip((X, WEIGHT), given, strict=True))
        )
        with shardwise.explicit():
            result = weighted(x, weight)
        torch.testing.assert_close(assemble(result), weighted(X, WEIGHT))
        return result.placements


def test_one_line_is_enough() -> None:
    shardwise.register_sharding(OP, "m n, m -> n ; linear 0 | 1")
    shardwise.register_sharding(BACKWARD, "n, m n, m -> m n, m ; linear 0")
    check(weighted, X, WEIGHT, limit=12)
    assert placements_of(Shard(0), Shard(0)) == (Partial("sum"),)
    assert placements_of(Shard(1), Replicate()) == (Shard(0),)
    assert placements_of(Replicate(), Partial("sum")) == (Partial("sum"),)


def test_a_function_of_the_call() -> None:
    shardwise.register_sharding(OP, lambda call: f"m n, m -> n ; {'linear 0 | 1' if call.ndim(0) == 2 else ''}")
    check(weighted, X, WEIGHT, limit=4, grad=False)


@torch.library.custom_op("shardwise_tests::centered", mutates_args=())
def centered(x: Tensor, power: float) -> Tensor:
    """The tensor without its mean, to a power; to the power 1, the tensor."""
    return x.clone() if power == 1 else (x - x.mean()) ** power


@centered.register_fake
def _(x: Tensor, power: float) -> Tensor:
    return torch.empty_like(x)


def test_a_function_that_looks_at_a_number() -> None:
    shardwise.register_sharding(
        torch.ops.shardwise_tests.centered.default,
        lambda call: "a b -> a b" if call.arg("power") == 1 else "[a] [b] -> [a] [b]",
    )
    with shardwise.simulate(2):
        x = shardwise.distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(0)])
        for power in (1.0, 2.0, 1.0, 3.0, 1.0):
            torch.testing.assert_close(assemble(centered(x, power)), centered(X, power))


def test_without_a_rule_it_runs_on_gathered_inputs() -> None:
    with pytest.warns(GatherWarning, match=r"shardwise.register_sharding\(torch.ops.shardwise_tests.weighted.default"):
        check(weighted, X, WEIGHT, limit=2, grad=False, meshes=((2,),))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("m n -> n", "the rule m n -> n has 1 operands, shardwise_tests.weighted.default has 2"),
        ("m n, m -> n, n", "the rule m n, m -> n, n has 2 results, shardwise_tests.weighted.default has 1"),
        ("m n, m", "write inputs -> outputs"),
        ("m n, m -> q", "q"),
        ("m n, m -> n ; linear 2", "2"),
        ("m n, m -> n ; kernel m", "kernel"),
    ],
)
def test_rules_that_do_not_fit_the_op(rule: str, reason: str) -> None:
    before = registry.rule_for(OP)
    with pytest.raises(RuleError, match=reason.replace(".", r"\.")):
        shardwise.register_sharding(OP, rule)
    assert registry.rule_for(OP) == before


def rows(x, weight):
    assert (tuple(x.shape), x.ndim, weight.dtype) == ((5, 4), 2, torch.float32)
    return [
        ([Replicate()], [Replicate(), Replicate()]),
        ([Shard(0)], [Shard(1), Replicate()]),
        ([Partial()], [Shard(0), Shard(0)]),
        ([Partial()], [Replicate(), Partial()]),
    ]


def test_pytorchs_form() -> None:
    registered = shardwise.experimental.register_sharding(OP)(rows)
    assert registered is rows
    check(weighted, X, WEIGHT, limit=12, grad=False)
    assert placements_of(Shard(0), Shard(0)) == (Partial("sum"),)
    assert placements_of(Shard(1), Replicate()) == (Shard(0),)
    assert placements_of(Replicate(), Partial("sum")) == (Partial("sum"),)


def test_pytorchs_form_for_an_op_that_has_a_rule() -> None:
    @shardwise.experimental.register_sharding(torch.ops.aten._softmax.default)
    def softmax(x, dim, half_to_float):
        assert half_to_float is False
        dims = [d for d in range(x.ndim) if d != dim % x.ndim]
        every = ([Replicate()], [Replicate(), None, None])
        return [every, *(([Shard(d)], [Shard(d), None, None]) for d in dims)]

    check(torch.softmax, torch.randn(5, 3, 4), dim=1, limit=8)


def test_rows_that_no_rule_can_express_are_left_out() -> None:
    @shardwise.experimental.register_sharding(OP)
    def strange(x, weight):
        return [
            ([Replicate()], [Shard(0), Shard(0)]),  # would have to be reduced by somebody
            ([Partial()], [Shard(1), Partial()]),
            ([Replicate()], [Partial(), Replicate()]),
        ]

    check(weighted, X, WEIGHT, limit=8, grad=False)


def test_kernels_need_a_rule_that_names_their_factors() -> None:
    kernel = Kernel(lambda call, shard: call.run(), traffic=0.0)
    with pytest.raises(
        InputError, match=r"kernels= without a rule[\s\S]*register_sharding\(op, rule, kernels=kernels\)"
    ):
        shardwise.register_sharding(OP, kernels={"k": kernel})  # type: ignore[call-overload]


def test_rows_of_the_wrong_length() -> None:
    shardwise.experimental.register_sharding(OP)(lambda x, weight: [([Shard(0)], [Shard(1)])])
    with pytest.raises(RuleError, match="has 1 output and 1 input placements: give 1 and 2"):
        check(weighted, X, WEIGHT, limit=1, grad=False, meshes=((2,),))


@torch.library.custom_op("shardwise_tests::add_row_sums", mutates_args=("total",))
def add_row_sums(total: Tensor, x: Tensor) -> None:
    total += x.sum(1)


@pytest.mark.parametrize("cut", [Shard(0), Shard(1), Replicate(), Partial()])
@pytest.mark.parametrize("total_cut", [Shard(0), Replicate()])
def test_an_op_that_writes_and_returns_nothing(cut, total_cut) -> None:
    shardwise.register_sharding(torch.ops.shardwise_tests.add_row_sums.default, "a, a [b] -> a")
    with shardwise.simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        total = make_dtensor(torch.ones(5), mesh, [total_cut], seed=0)
        x = make_dtensor(X, mesh, [cut], seed=0)
        for count in (1, 2):  # planned, then by the hot path
            assert add_row_sums(total, x) is None
            torch.testing.assert_close(assemble(total), 1 + count * X.sum(1))


def test_an_op_by_its_packet_and_by_its_name() -> None:
    for op in (torch.ops.shardwise_tests.weighted, "shardwise_tests::weighted", "shardwise_tests::weighted.default"):
        with registry.restored():
            shardwise.register_sharding(op, "m n, m -> n ; linear 0 | 1")
            assert placements_of(Shard(0), Shard(0)) == (Partial("sum"),)
            with pytest.raises(RuleError, match="the rule m n -> n has 1 operands"):
                shardwise.register_sharding(op, "m n -> n")
    for name in ("shardwise_tests::nonsense", "aten::mm.nonsense", "weighted"):
        with pytest.raises(RuleError, match=f"no op is called '{name}'"):
            shardwise.register_sharding(name, "m n, m -> n")


def test_a_rule_of_an_op_that_pytorch_decomposes() -> None:
    matmul = torch.ops.aten.matmul.default
    with pytest.warns(UserWarning, match=r"a rule of aten\.matmul\.default is used in inference mode alone"):
        shardwise.register_sharding(matmul, "m [k], [k] n -> m n")
    assert "by PyTorch; in inference mode by the user's rule for aten::matmul.default" in shardwise.rules.explain(
        matmul
    )
    with pytest.warns(UserWarning, match="used in inference mode alone"):
        shardwise.experimental.register_sharding(torch.ops.aten.rms_norm.default)(lambda *args: [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardwise.register_sharding(torch.ops.aten.linear.default, "x.. [k], n [k], n -> x.. n")
        shardwise.register_sharding(torch.ops.aten.silu_backward.default, "b.., b.. -> b..")
    with shardwise.simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = make_dtensor(X, mesh, [Shard(1)], seed=0)
        weight = make_dtensor(X[:3], mesh, [Shard(1)], seed=1)
        assert torch.nn.functional.linear(x, weight).placements != (Partial("sum"),)
