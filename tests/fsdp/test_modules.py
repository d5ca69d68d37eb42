"""Kinds of modules and of training: ties, frozen parameters, dtypes, accumulation, checkpointing, copies, files."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Shard, distribute_tensor
from shardwise.debug import CommDebugMode
from shardwise.errors import InputError
from shardwise.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    schedule,
)
from shardwise.parallel import ColwiseParallel, parallelize_module
from shardwise.sharding.mesh import MeshInfo, mesh_info_of
from tests.fsdp.models import assert_same_parameters, batches, full, loss_of, new_model, shard
from tests.worlds import mesh_of


def over_rows(mesh: Any) -> Callable[[Tensor], Tensor]:
    return lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    wanted = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=1e-4)


def test_a_tie_between_groups_is_kept() -> None:
    expected = new_model()
    loss_of(expected, batches(1)[0]).backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = new_model()
        fully_shard(model.head, mesh=mesh)
        shard(model, mesh)
        assert model.head.weight is model.embedding.weight
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        assert model.head.weight is model.embedding.weight
        assert_same_gradients(model, expected)


def test_frozen_parameters_get_no_gradient() -> None:
    expected = new_model()
    with mesh_of(4, names=("dp",)) as mesh:
        model = new_model()
        for each in (expected, model):
            each.blocks[1].requires_grad_(False)
            each.blocks[0].up.weight.requires_grad_(False)
        shard(model, mesh)
        loss_of(expected, batches(1)[0]).backward()
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        assert_same_gradients(model, expected)
        model.blocks[1].requires_grad_(True)
        expected.blocks[1].requires_grad_(True)
        for each, tokens in ((expected, batches(1)[0]), (model, over_rows(mesh)(batches(1)[0]))):
            each.zero_grad()
            loss_of(each, tokens).backward()
        assert_same_gradients(model, expected)


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 10)
        self.b = nn.Linear(10, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)).double())


def test_two_dtypes_share_one_gather() -> None:
    torch.manual_seed(0)
    expected, x = TwoTypes(), torch.randn(7, 6)
    expected(x).sum().backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(copy.deepcopy(expected).requires_grad_(), mesh=mesh)
        model.zero_grad()
        given = over_rows(mesh)(x)
        with CommDebugMode() as counted:
            out = model(given)
        assert [collective.kind for collective in counted.collectives] == ["all-gather"]
        out.sum().backward()
        assert_same_gradients(model, expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_dim_to_shard(dim: int) -> None:
    expected = new_model()
    loss_of(expected, batches(1)[0]).backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
        assert model.blocks[0].up.weight.placements == (Shard(dim),)
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        assert_same_gradients(model, expected)


def test_parameters_to_ignore_stay() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        kept = model[1].weight
        fully_shard(model, mesh=mesh, ignored_params={kept})
        assert model[1].weight is kept
        assert isinstance(model[1].bias, DTensor)


def test_gradients_accumulate_without_communication() -> None:
    expected = new_model()
    first, second = batches(2)
    for tokens in (first, second):
        loss_of(expected, tokens).backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        model.set_requires_gradient_sync(False)
        loss_of(model, over_rows(mesh)(first)).backward()
        assert [event for event in schedule(model) if event.action == "reduce"] == []
        assert gradients(model) == {}
        model.set_requires_gradient_sync(True)
        loss_of(model, over_rows(mesh)(second)).backward()
        assert_same_gradients(model, expected)


def test_gradients_accumulate_over_the_axis_that_shards_only() -> None:
    expected = new_model()
    first, second = batches(2)
    for tokens in (first, second):
        loss_of(expected, tokens).backward()
    with mesh_of(2, 2, names=("replicate", "dp")) as mesh:
        model = shard(new_model(), mesh)
        model.set_requires_all_reduce(False)
        with CommDebugMode() as counted:
            loss = loss_of(model, distribute_tensor(first, mesh, [Shard(0), Shard(0)]))
            before = len(counted.collectives)
            loss.backward()
        assert not [c for c in counted.collectives[before:] if c.kind == "all-reduce" and c.received > 100]
        assert gradients(model) == {}
        model.set_requires_all_reduce(True)
        loss_of(model, distribute_tensor(second, mesh, [Shard(0), Shard(0)])).backward()
        assert_same_gradients(model, expected)


def test_gradients_of_several_steps_are_added() -> None:
    expected = new_model()
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        for tokens in batches(2):
            loss_of(expected, tokens).backward()
            loss_of(model, over_rows(mesh)(tokens)).backward()
        assert_same_gradients(model, expected)


def test_several_forward_passes_before_one_backward_pass() -> None:
    expected = new_model()
    first, second = batches(2)
    (loss_of(expected, first) + loss_of(expected, second)).backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        (loss_of(model, over_rows(mesh)(first)) + loss_of(model, over_rows(mesh)(second))).backward()
        assert_same_gradients(model, expected)
        assert sum(event.action == "reduce" for event in schedule(model)) == 4


def test_a_module_that_is_used_twice() -> None:
    torch.manual_seed(0)
    shared, x = nn.Linear(6, 6), torch.randn(7, 6)
    expected = nn.Sequential(shared, nn.ReLU(), shared)
    expected(x).sum().backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = copy.deepcopy(expected)
        model.zero_grad()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(over_rows(mesh)(x)).sum().backward()
        assert_same_gradients(model, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing(reentrant: bool, inside: bool) -> None:
    def save_inputs_only(model: nn.Module) -> None:
        for block in model.blocks:
            module = block.down if inside else block
            forward = module.forward if inside else module.__call__

            def again(x: Tensor, forward: Any = forward) -> Tensor:
                return checkpoint(forward, x, use_reentrant=reentrant)

            (module if inside else block).forward = again if inside else block.forward
        if not inside:
            model.blocks = nn.ModuleList(Around(block, reentrant) for block in model.blocks)

    expected = new_model()
    loss_of(expected, batches(1)[0]).backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = new_model()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        save_inputs_only(model)
        fully_shard(model, mesh=mesh)
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        found = {name.replace(".module", ""): gradient for name, gradient in gradients(model).items()}
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)
        gathers = [event for event in schedule(model) if event.action in ("gather", "prefetch")]
        assert len(gathers) == 1 + 2 * 3


class Around(nn.Module):
    def __init__(self, module: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = module, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def test_construction_on_the_meta_device() -> None:
    expected = new_model()
    with mesh_of(4, names=("dp",)) as mesh:
        with torch.device("meta"):
            model = new_model()
        shard(model, mesh)
        with pytest.raises(InputError, match=r"is on the meta device and has no data.*to_empty"):
            model(over_rows(mesh)(batches(1)[0]))
        model.reset_iter_state()
        model.to_empty(device="cpu")
        state = dict(expected.state_dict())
        with torch.no_grad():
            model.scale.copy_(state.pop("scale"))
            for name, parameter in model.named_parameters():
                parameter.copy_(distribute_tensor(state[name], parameter.device_mesh, parameter.placements))
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        loss_of(expected, batches(1)[0]).backward()
        assert_same_gradients(model, expected)


def test_state_dicts_hold_sharded_parameters_and_load() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        source, model = shard(new_model(), mesh), shard(new_model(), mesh)
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(1.0)
        source(over_rows(mesh)(batches(1)[0]))  # the root stays gathered until backward
        state = source.state_dict()
        assert isinstance(state["blocks.0.up.weight"], DTensor)
        model.load_state_dict(state)
        loss = loss_of(model, over_rows(mesh)(batches(1)[0]))
        torch.testing.assert_close(full(loss), full(loss_of(source, over_rows(mesh)(batches(1)[0]))))
        assigned = shard(new_model(), mesh)
        assigned.load_state_dict(copy.deepcopy(state), assign=True)
        again = loss_of(assigned, over_rows(mesh)(batches(1)[0]))
        torch.testing.assert_close(full(loss), full(again))
        again.backward()
        assert all(parameter.grad is not None for parameter in assigned.parameters())


def test_a_copy_has_parameters_of_its_own() -> None:
    expected = new_model()
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        copied = copy.deepcopy(model)
        assert isinstance(copied.blocks[0], FSDPModule)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        copied.zero_grad()
        loss_of(copied, over_rows(mesh)(batches(1)[0])).backward()
        loss_of(expected, batches(1)[0]).backward()
        assert_same_gradients(copied, expected)
        assert_same_parameters(copied, expected)


def test_a_copy_starts_from_the_first_pass_of_its_own() -> None:
    """Also where the original runs first, on distributed inputs, over whose mesh its buffers are then replicated."""
    torch.manual_seed(0)
    expected, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), torch.randn(13, 6)
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(copy.deepcopy(expected), mesh=mesh)
        copied = copy.deepcopy(model)
        expected(x).square().sum().backward()
        for each in (model, copied):
            each(over_rows(mesh)(x)).square().sum().backward()
            assert_same_gradients(each, expected)
            torch.testing.assert_close(full(each[1].running_var), expected[1].running_var)


def test_inference_leaves_nothing_gathered() -> None:
    expected = new_model()
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        with torch.no_grad():
            out = model(over_rows(mesh)(batches(1)[0]))
        torch.testing.assert_close(full(out), expected(batches(1)[0]).detach())
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert schedule(model).events[-1].action == "free"


@pytest.mark.parametrize("accumulate", [False, True])
def test_mixed_precision(accumulate: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    seen: list[torch.dtype] = []
    with mesh_of(4, names=("dp",)) as mesh:
        model = nn.Linear(8, 8)
        expected = copy.deepcopy(model)
        model.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        x = torch.randn(8, 8)
        for last in [False, True] if accumulate else [True]:
            model.set_requires_gradient_sync(last)
            out = model(over_rows(mesh)(x))
            out.sum().backward()
            expected(x).sum().backward()
        assert seen == [torch.bfloat16] * (2 if accumulate else 1)
        assert out.dtype == torch.float32
        assert model.weight.dtype == model.weight.grad.dtype == torch.float32
        torch.testing.assert_close(full(model.weight.grad), expected.weight.grad, atol=0.05, rtol=0.05)


def test_parameters_in_host_memory() -> None:
    expected = new_model()
    loss_of(expected, batches(1)[0]).backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh, offload_policy=CPUOffloadPolicy())
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        assert_same_gradients(model, expected)


def test_parameters_can_be_gathered_and_freed_by_hand() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        value = full(model.weight)
        handle = model.unshard(async_op=True)
        assert isinstance(model.weight, DTensor)
        handle.wait()
        assert torch.equal(model.weight.shards[3], value)
        model.reshard()
        assert isinstance(model.weight, DTensor)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def score(self, x: Tensor) -> Tensor:
        return self.forward(x).sum()


def test_several_modules_in_one_group() -> None:
    torch.manual_seed(0)
    expected, x = Pair(), torch.randn(7, 6)
    expected(x).sum().backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = copy.deepcopy(expected)
        model.zero_grad()
        fully_shard([model.norm, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        given = over_rows(mesh)(x).requires_grad_()
        with CommDebugMode() as counted:
            model(given).sum().backward()
        kinds = [c.kind for c in counted.collectives if c.kind in ("all-gather", "reduce-scatter")]
        assert kinds == ["all-gather", "all-gather", "reduce-scatter"]
        assert_same_gradients(model, expected)


def test_another_method_as_forward() -> None:
    torch.manual_seed(0)
    expected, x = Pair(), torch.randn(7, 6)
    expected.score(x).backward()
    with mesh_of(4, names=("dp",)) as mesh:
        model = copy.deepcopy(expected)
        model.zero_grad()
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "score")
        copied = copy.deepcopy(model)
        for each in (model, copied):
            each.score(over_rows(mesh)(x)).backward()
            assert_same_gradients(each, expected)


def test_without_a_mesh_all_ranks_shard() -> None:
    with mesh_of(4):
        model = fully_shard(nn.Linear(8, 8))
        assert model.weight.placements == (Shard(0),)
        assert model.weight.device_mesh.shape == (4,)


def test_a_divide_factor() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh)
        model.set_gradient_divide_factor(2.0)
        x = over_rows(mesh)(torch.ones(4, 8)).to_local()
        model(x).sum().backward()
        torch.testing.assert_close(full(model.weight.grad), torch.full((8, 8), 2.0))


def test_parameters_without_a_gradient_on_request() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = Pair()
        model.unused = nn.Linear(3, 3)
        fully_shard(model, mesh=mesh)
        model(over_rows(mesh)(torch.randn(7, 6))).sum().backward()
        assert model.unused.weight.grad is None
        model.set_reduce_scatter_unused_params(True)
        model(over_rows(mesh)(torch.randn(7, 6))).sum().backward()
        assert torch.equal(full(model.unused.weight.grad), torch.zeros(3, 3))


def test_errors() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        with pytest.raises(InputError, match="has no forward pass"):
            fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh["dp"])
        module = nn.Module()
        module.scale = nn.Parameter(torch.ones(()))
        with pytest.raises(InputError, match="'scale', which has no dims"):
            fully_shard(module, mesh=mesh["dp"])
        model = fully_shard(nn.Linear(2, 2), mesh=mesh["dp"])
        with pytest.raises(InputError, match="twice"):
            fully_shard(model, mesh=mesh["dp"])
        x = distribute_tensor(torch.ones(2, 2), mesh["dp"], [Shard(0)])
        with pytest.raises(InputError, match="erase"):
            shardwise.erase(lambda x: model(x).sum())(x)


def test_kept_parameters_follow_the_optimizer() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=False)
        x = over_rows(mesh)(torch.ones(4, 8))
        with torch.no_grad():
            model(x)
            for parameter in model._fully_shard_state.group.parameters:
                parameter.sharded.zero_()
            assert torch.equal(full(model(x)), torch.zeros(4, 8))


def test_modules_to_prefetch() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        first, second, third = model.blocks
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        events = [tuple(event) for event in schedule(model) if event.action == "prefetch"]
        assert events[:2] == [("forward", "blocks.1", "prefetch"), ("forward", "blocks.2", "prefetch")]
        assert events[-2:] == [("backward", "blocks.1", "prefetch"), ("backward", "blocks.0", "prefetch")]


def test_axes_of_data_parallel_by_name() -> None:
    with mesh_of(2, 2, names=("dp", "tp")) as mesh:
        model = nn.Linear(8, 8)
        parallelize_module(model, mesh, ColwiseParallel(use_local_output=False))
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        assert str(model.weight.spec) == "f32[8@(tp, dp), 8]"


def test_a_changed_dtype_is_an_error() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(nn.Linear(8, 8), mesh=mesh).double()
        with pytest.raises(InputError, match=r"made the parameter 'weight' f32\[8@dp, 8\], and now it is f64.*before"):
            model(over_rows(mesh)(torch.ones(4, 8, dtype=torch.float64)))


def test_a_parameter_that_was_replaced_by_a_plain_tensor_is_an_error() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        model.weight = nn.Parameter(torch.ones(8, 8))
        with pytest.raises(InputError, match=r"and now it is a plain torch.float32 tensor of shape \[8, 8\]"):
            model(over_rows(mesh)(torch.ones(4, 8)))


@dataclass
class Output:
    value: Tensor


class Wrapped(nn.Linear):
    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


def test_outputs_in_dataclasses() -> None:
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(Wrapped(8, 8), mesh=mesh, reshard_after_forward=True)
        x = over_rows(mesh)(torch.ones(4, 8)).requires_grad_()
        model(x).value.sum().backward()
        torch.testing.assert_close(full(x.grad), full(model.weight).sum(0).expand(4, 8))


def test_after_an_error_in_backward() -> None:
    expected = new_model()
    loss_of(expected, batches(1)[0]).backward()

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("on purpose")

    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        handle = model.blocks[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
        with pytest.raises(ArithmeticError):
            loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        handle.remove()
        model.zero_grad()
        loss_of(model, over_rows(mesh)(batches(1)[0])).backward()
        assert_same_gradients(model, expected)


def test_reductions_may_end_with_the_last_backward_pass() -> None:
    expected = new_model()
    first, second = batches(2)
    with mesh_of(4, names=("dp",)) as mesh:
        model = shard(new_model(), mesh)
        model.set_is_last_backward(False)
        loss_of(model, over_rows(mesh)(first)).backward()
        assert model.embedding.weight.grad is None  # the last reduction of the pass is not waited for
        model.set_is_last_backward(True)
        loss_of(model, over_rows(mesh)(second)).backward()
        for tokens in (first, second):
            loss_of(expected, tokens).backward()
        assert_same_gradients(model, expected)


def test_running_statistics_are_those_of_the_global_batch() -> None:
    torch.manual_seed(0)
    expected, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), torch.randn(13, 6)
    with mesh_of(4, names=("dp",)) as mesh:
        model = fully_shard(copy.deepcopy(expected), mesh=mesh)
        expected(x).square().sum().backward()
        model(over_rows(mesh)(x)).square().sum().backward()
        assert_same_gradients(model, expected)
        torch.testing.assert_close(full(model[1].running_var), expected[1].running_var)
        assert full(model[1].num_batches_tracked) == 1


def test_a_step_does_not_keep_a_world() -> None:
    def step() -> weakref.ref[MeshInfo]:
        with mesh_of(2, names=("dp",)) as mesh:
            model = nn.Sequential(*(fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2)))
            fully_shard(model, mesh=mesh)(over_rows(mesh)(torch.randn(4, 4))).sum().backward()
            return weakref.ref(mesh_info_of(mesh))

    info = step()
    gc.collect()
    assert info() is None


def test_a_class_that_a_function_defines_ends_with_its_modules() -> None:
    def make() -> weakref.ref[type]:
        class Local(nn.Linear):
            pass

        with mesh_of(2, names=("dp",)) as mesh:
            one, other = (fully_shard(Local(4, 4), mesh=mesh) for _ in range(2))
        assert type(one) is type(other)
        assert isinstance(one, Local)
        return weakref.ref(Local)

    found = make()
    gc.collect()
    assert found() is None
