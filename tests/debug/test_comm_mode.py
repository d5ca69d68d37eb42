"""CommDebugMode counts collectives and bytes by module and pass, on processes and simulated ranks."""

import inspect
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.debug as torch_debug
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardwise
import shardwise.parallel
from shardwise import DTensor, P, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, plan, simulate
from shardwise.comm.plan import received_exactly
from shardwise.debug import CommDebugMode
from shardwise.debug.module_calls import ModuleCalls
from tests.processes.pool import on_processes

public, native = torch.ops.c10d_functional, torch.ops._c10d_functional


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).redistribute(placements=[Replicate()])
        return x


def tensor_parallel(model: nn.Module, mesh: shardwise.DeviceMesh) -> nn.Module:
    for module in model.modules():
        if isinstance(module, MLP):
            for linear, placement in ((module.up, Shard(0)), (module.down, Shard(1))):
                linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh, [placement]))
    return model


def two_layers_are_counted() -> None:
    """Each layer: its output is reduced going forward, the gradient of its input going backward."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = tensor_parallel(Two(), mesh)
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()]).requires_grad_()
    comm = CommDebugMode()
    with comm:
        model(x).sum().backward()
    size = 2 * 4 * 8 * 4 * 3 // 4  # a ring brings each rank 3/4 of the tensor, twice
    assert comm.get_total_counts() == 4
    assert comm.get_comm_counts() == {public.all_reduce: 4} == comm.comm_counts
    assert comm.get_comm_counts()[native.all_reduce] == 4
    assert comm.get_comm_counts()[public.all_gather_into_tensor] == 0
    assert comm.get_comm_bytes() == {public.all_reduce: 4 * size}
    assert comm.get_total_bytes() == 4 * size
    counts = {
        module: tuple(passes[name][public.all_reduce] for name in ("forward", "backward"))
        for module, passes in comm.comm_module_counts.items()
    }
    assert counts == {
        "Global": (2, 2),
        "Two": (2, 1),  # the gradient of `x` itself belongs to no module
    }
    assert comm.get_sharding_info() == {
        f"Two.layers.{i}.{name}.weight": (placement,)
        for i in (0, 1)
        for name, placement in (("up", Shard(0)), ("down", Shard(1)))
    }
    assert comm.get_parameter_info()["Two.layers.1.up"]["weight"] is model.layers[1].up.weight


def test_simulated() -> None:
    with simulate(4):
        two_layers_are_counted()


@on_processes
def test_on_processes() -> None:
    two_layers_are_counted()


def redistributions_receive_what_their_plans_say() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(8.0 * 12).reshape(8, 12)
    pairs = [
        (P("dp", "tp"), P()),
        (P("dp", "tp"), P(("dp", "tp"))),
        (P(("dp", "tp")), P(None, ("dp", "tp"))),
        (P(partial={"dp": "sum"}), P("dp")),
        (P(partial={"dp": "sum", "tp": "sum"}), P()),
    ]
    for before, after in pairs:
        x = distribute_tensor(whole, mesh, before)
        expected = plan(x, after).plan
        with CommDebugMode() as comm:
            x.redistribute(placements=after)
        assert comm.get_total_counts() == expected.collectives
        assert comm.get_total_bytes() == sum(received_exactly(step, 4) for step in expected.steps)


def test_bytes_simulated() -> None:
    with simulate(4):
        redistributions_receive_what_their_plans_say()


@on_processes
def test_bytes_on_processes() -> None:
    redistributions_receive_what_their_plans_say()


def test_the_rank_that_receives_most_counts() -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        x, y = (distribute_tensor(torch.arange(size), mesh, [Shard(0)]) for size in (5.0, 10.0))
        with CommDebugMode() as comm:
            x.redistribute(placements=[Replicate()])
        # pieces of 2, 2, 1 and 0: the last rank lacks 5 numbers; padded pieces would be 6
        assert comm.get_comm_bytes() == {public.all_to_all_single: 20}
        with CommDebugMode() as comm:
            y.redistribute(placements=[Replicate()])
        # pieces of 3, 3, 3 and 1, padded to 3, which is what the last rank lacks, too
        assert comm.get_comm_bytes() == {public.all_gather_into_tensor: 36}


MODELS = {
    "tensor": lambda lib: {"1": lib.ColwiseParallel(), "3": lib.RowwiseParallel()},
    "sequence": lambda lib: {
        "0": lib.SequenceParallel(),
        "1": lib.ColwiseParallel(input_layouts=lib.S1),
        "3": lib.RowwiseParallel(output_layouts=lib.S1),
    },
}


@pytest.mark.parametrize("kind", list(MODELS))
@on_processes
def test_plain_activations_and_parameters_as_in_pytorch(kind) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    found = []
    for lib, mode, shard in (
        (shardwise.parallel, CommDebugMode(), Shard(1)),
        (torch_parallel, torch_debug.CommDebugMode(), torch_tensor.Shard(1)),
    ):
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
        names = SimpleNamespace(**vars(lib), S1=shard)
        lib.parallelize_module(model, mesh, MODELS[kind](names))
        x = torch.ones(2, 2, 8, requires_grad=True)
        with mode:  # the last norm, and in one of the models the first, have plain parameters
            model(x).sum().backward()
        found.append(dict(mode.get_comm_counts()))
    ours, theirs = found
    if kind == "sequence":  # PyTorch leaves the gradients of the norm unreduced
        assert ours.pop(public.all_reduce) == 1
    assert ours == theirs


@on_processes
def test_creating_parameters_inside_the_mode() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with CommDebugMode() as comm:
        model = shardwise.parallel.parallelize_module(nn.Linear(8, 16), mesh, shardwise.parallel.ColwiseParallel())
        assert model(torch.ones(2, 8)).shape == (2, 4)
    assert comm.get_comm_counts() == {public.all_to_all_single: 2}


@on_processes
def test_an_even_all_gather_is_one_all_gather() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for placement in (Shard(0), Shard(1)):
        with CommDebugMode() as comm:
            DTensor.from_local(torch.ones(4, 4), mesh, [placement]).full_tensor()
        assert comm.get_comm_counts()[public.all_gather_into_tensor] == 1
        assert comm.get_total_counts() == 1


@on_processes
def test_plain_collectives_as_in_pytorch() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = torch.ones(4)

    def program() -> None:
        warnings.simplefilter("ignore", FutureWarning)  # some have a new name in newer versions
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather_into_tensor(torch.empty(16), x)
        dist.all_gather([torch.empty(4) for _ in range(4)], x)
        dist.reduce_scatter_tensor(torch.empty(1), x)
        dist.all_to_all_single(torch.empty(4), x)
        dist.barrier()
        for pending in (
            funcol.all_reduce(x, "sum", mesh),
            funcol.all_gather_tensor(x, 0, mesh),
            funcol.all_gather_tensor_autograd(x.requires_grad_(), 0, mesh),
            funcol.reduce_scatter_tensor(x.detach(), "sum", 0, mesh),
            funcol.all_to_all_single(x.detach(), None, None, mesh),
            *funcol.all_reduce_coalesced([x.detach(), x.detach()], "sum", mesh),
        ):
            funcol.wait_tensor(pending)
        x.requires_grad_(False)

    with CommDebugMode() as comm:
        program()
    with torch_debug.CommDebugMode() as theirs:
        program()
    assert comm.get_comm_counts() == dict(theirs.get_comm_counts())
    assert comm.get_total_counts() == theirs.get_total_counts()
    c10d = torch.ops.c10d
    assert comm.get_comm_bytes() == {
        c10d.allreduce_: 24,
        c10d.broadcast_: 16,
        c10d._allgather_base_: 48,
        c10d.allgather_: 48,
        c10d._reduce_scatter_base_: 12,
        c10d.alltoall_base_: 12,
        public.all_reduce: 24,
        public.all_gather_into_tensor: 96,
        public.reduce_scatter_tensor: 12,
        public.all_to_all_single: 12,
        public.all_reduce_coalesced: 48,
    }


def test_plain_collectives_of_simulated_ranks() -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,))
        x = distribute_tensor(torch.ones(16), mesh, [Shard(0)]).to_local()
        with CommDebugMode() as comm:
            dist.all_reduce(x, group=mesh.get_group())
            torch.ops._c10d_functional_autograd.all_gather_into_tensor(x, 4, mesh.get_group().group_name)
        assert comm.get_comm_counts() == {torch.ops.c10d.allreduce_: 1, public.all_gather_into_tensor: 1}
        assert comm.get_comm_bytes() == {torch.ops.c10d.allreduce_: 24, public.all_gather_into_tensor: 48}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_belongs_to_the_backward_pass(reentrant) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.inner.register_forward_pre_hook(lambda _, args: args[0].redistribute(placements=[Replicate()]))

        def forward(self, x: DTensor) -> DTensor:
            return checkpoint(lambda y: self.inner(y).sin(), x, use_reentrant=reentrant)

    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(4), mesh, [Shard(0)]).requires_grad_()
        with CommDebugMode() as comm:
            Block()(x).sum().backward()
        counts = comm.comm_module_counts["Block.inner"]
        assert counts["forward"] == {public.all_gather_into_tensor: 1}
        assert counts["backward"] == {public.all_gather_into_tensor: 1}
        again = [c.moment.recomputing for c in comm.collectives]
        assert again == [False, True]


def test_gradients_are_reduced_for_the_module_that_owns_the_parameter() -> None:
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
        x = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])

        def counted() -> dict[str, int]:
            with CommDebugMode() as comm:
                model(x).square().sum().backward()
            return {name: passes["backward"].total() for name, passes in comm.comm_module_counts.items()}

        with shardwise.bucket_gradients(None):
            assert counted() == {"Global": 4, "Sequential": 4, "Sequential.0": 2, "Sequential.1": 2}
        assert counted() == {"Global": 1}  # at the end of the pass, for several modules


def test_a_tensor_at_the_address_of_a_former_parameter_has_no_name() -> None:
    calls, module = ModuleCalls(), nn.Linear(2, 2)
    with calls.track():
        module(torch.ones(2))
    assert calls.parameter_name(module.weight) == "Linear.weight"
    module.weight = nn.Parameter(torch.ones(2, 2))
    assert [calls.parameter_name(tensor) for tensor in [torch.ones(2) for _ in range(100)]] == [None] * 100


def test_tables_and_files(tmp_path) -> None:
    with simulate(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = tensor_parallel(MLP(), mesh)
        model.up.register_forward_pre_hook(lambda _, args: args[0].redistribute(placements=[Replicate()]))
        model.down.register_forward_hook(lambda _, args, out: out.redistribute(placements=[Replicate()]))
        x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()]).requires_grad_()
        comm = CommDebugMode()
        with comm:
            model(x).sum().backward()
    assert comm.generate_comm_debug_tracing_table(noise_level=0) == TABLE
    levels = [comm.generate_comm_debug_tracing_table(noise_level=level) for level in range(4)]
    assert [len(text.splitlines()) for text in levels] == sorted({len(text.splitlines()) for text in levels})
    assert "shardwise.linear_input_gradient.default(f32[4, 8], f32[8, 16@tp])" in levels[1]
    assert "aten.detach.default" not in levels[2]
    assert "aten.detach.default(f32[8, 16@tp])" in levels[3]
    comm.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"), noise_level=1)
    assert (tmp_path / "log.txt").read_text() == levels[1] + "\n"
    comm.generate_json_dump(str(tmp_path / "log.json"), noise_level=1)
    tree = json.loads((tmp_path / "log.json").read_text())
    (mlp,) = tree["children"]
    assert [child["fqn"] for child in mlp["children"]] == ["MLP.up", "MLP.act", "MLP.down"]
    assert tree["collectives_backward"] == [["c10d_functional.all_reduce", 1]]
    assert tree["bytes_backward"] == 192
    assert mlp["children"][0]["parameters"] == [["weight", "(Shard(dim=0),)"]]
    assert mlp["children"][0]["operations_forward"][0]["input_sharding"] == ["(Replicate(),)", "(Shard(dim=0),)"]


TABLE = """\
┌──────────┬──────────────────────────────────┬──────────────────────────────────┐
│ module   │ forward                          │ backward                         │
├──────────┼──────────────────────────────────┼──────────────────────────────────┤
│ Global   │   1 all-reduce over tp     192 B │   1 all-reduce over tp     192 B │
│   MLP    │   1 all-reduce over tp     192 B │   1 all-reduce over tp     192 B │
│     up   │                                  │   1 all-reduce over tp     192 B │
│     down │   1 all-reduce over tp     192 B │                                  │
└──────────┴──────────────────────────────────┴──────────────────────────────────┘"""


def test_entering_again_resets_the_counts() -> None:
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Partial()])
        comm = CommDebugMode()
        with comm:
            x.full_tensor()
        assert comm.get_total_counts() == 1
        with comm:
            pass
        assert comm.get_total_counts() == 0
        call = nn.Module.__call__
        with pytest.raises(RuntimeError, match="stop"), comm:
            raise RuntimeError("stop")
        assert nn.Module.__call__ is call


def test_modes_nest() -> None:
    """Each counts what is inside it, and a counter of floating-point operations works beside them."""
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        with CommDebugMode() as outer, FlopCounterMode(display=False) as flops:
            x.full_tensor()
            with CommDebugMode() as inner:
                (x @ x).full_tensor()
        # x is gathered as the second operand, and the product is gathered
        assert inner.get_total_counts() == 2
        assert outer.get_total_counts() == 3
        assert flops.get_total_flops() > 0


def test_asynchronous_ones_count_when_they_start() -> None:
    with simulate(2):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with CommDebugMode() as comm:
            y = x.redistribute(placements=[Replicate()], async_op=True)
            assert comm.get_total_counts() == 1
            y.sum()
        assert comm.get_total_counts() == 1


def test_same_names_and_signatures_as_pytorch() -> None:
    assert set(torch_debug.__all__) <= set(shardwise.debug.__all__)
    theirs = torch_debug.CommDebugMode
    for name in [name for name in vars(theirs) if name.startswith(("get_", "generate_", "log_"))]:
        parameters = inspect.signature(getattr(theirs, name)).parameters
        ours = inspect.signature(getattr(CommDebugMode, name)).parameters
        assert [(p.name, p.default) for p in parameters.values()] == [(p.name, p.default) for p in ours.values()]


def test_the_counts_of_all_modules_are_there_without_a_collective():
    with simulate(2), CommDebugMode() as comm:
        distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()], src_data_rank=None) + 1
    assert sum(comm.comm_module_counts["Global"]["forward"].values()) == 0
