"""shardwise in the place of torch.distributed.tensor, in processes of its own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shardwise._torch.python_functions import functions_that_make_tensors
from shardwise._torch.state_dicts import distributing_functions, gathering_functions

PROGRAMS = Path(__file__).parent / "programs"


def run(program: str, *, fails: bool = False, arguments: tuple[str, ...] = ("-c",)) -> str:
    command = [sys.executable, "-W", "error", *arguments, textwrap.dedent(program)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode != 0) == fails, found.stderr
    return found.stderr if fails else found.stdout


def test_every_spelling_gives_shardwise():
    assert (
        run("""
        import shardwise
        shardwise.install()
        shardwise.install()
        import torch
        import torch.distributed.tensor as package
        import torch.distributed.tensor._random
        from torch.distributed import tensor
        from torch.distributed._tensor import DTensor as old_spelling
        from torch.distributed._tensor.placement_types import Shard as old_shard
        from torch.distributed.tensor import DTensor, _random
        from torch.distributed.tensor._dtensor_spec import DTensorSpec
        from torch.distributed.tensor.experimental import local_map
        from torch.distributed.tensor.experimental._attention import set_rotate_method
        from torch.distributed.tensor.parallel import ColwiseParallel
        from torch.distributed.tensor.parallel.style import RowwiseParallel
        assert package is tensor is shardwise and torch.distributed.tensor.DTensor is shardwise.DTensor
        assert DTensor is old_spelling is shardwise.DTensor and old_shard is shardwise.Shard
        assert DTensorSpec is shardwise.DTensorSpec
        assert _random is torch.distributed.tensor._random
        with shardwise.simulate(4):
            mesh = tensor.init_device_mesh("cpu", (4,))
            x = tensor.distribute_tensor(torch.arange(10.0), mesh, [tensor.Shard(0)])
            print(torch.equal((x.sin() + x).full_tensor(), torch.arange(10.0).sin() + torch.arange(10.0)))
        """)
        == "True\n"
    )


def test_a_graph_prints():
    found = run("""
        import shardwise
        shardwise.install()
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx
        graph = make_fx(lambda x: x.sin())(torch.ones(3))
        with shardwise.simulate(4):
            x = shardwise.zeros(4, device_mesh=shardwise.init_device_mesh("cpu", (4,)), placements=[shardwise.Shard(0)])
            next(node for node in graph.graph.nodes if node.op == "placeholder").meta["val"] = x
            print(graph.print_readable(print_output=False))
        """)
    assert 'x_1: "DTensor(f32[4], S(0))"' in found


FILES = """
import sys
import warnings
import torch
import torch.distributed as dist
import shardwise

def save(name):
    import torch.distributed.checkpoint as dcp
    x = shardwise.distribute_tensor(torch.arange(10.0), mesh, [shardwise.Shard(0)])
    torch.save(x, f"{sys.argv[1]}/{name}.pt")
    dcp.save({"x": x}, checkpoint_id=f"{sys.argv[1]}/{name}", no_dist=True)

def load(name):
    import torch.distributed.checkpoint as dcp
    x = torch.load(f"{sys.argv[1]}/{name}.pt")
    assert type(x) is shardwise.DTensor and torch.equal(x.full_tensor(), torch.arange(10.0))
    state = {"x": shardwise.distribute_tensor(torch.zeros(10), mesh, [shardwise.Replicate()])}
    dcp.load(state, checkpoint_id=f"{sys.argv[1]}/{name}", no_dist=True)
    assert torch.equal(state["x"].full_tensor(), torch.arange(10.0))

warnings.filterwarnings("ignore", "torch.distributed is disabled")
"""
WITHOUT_TAKE_OVER = """
with shardwise.simulate(2):
    mesh = shardwise.init_device_mesh("cpu", (2,))
    save("without")
"""
AND_BACK = """
finders = list(sys.meta_path)
shardwise.install()
from torch.distributed._tensor.placement_types import Shard
from torch.distributed.tensor.parallel import ColwiseParallel
assert Shard is shardwise.Shard
with shardwise.simulate(2):
    mesh = shardwise.init_device_mesh("cpu", (2,))
    save("with")
    load("without")
    shardwise.uninstall()
    shardwise.uninstall()
    assert sys.meta_path == finders
    assert dist.tensor is sys.modules["torch.distributed.tensor"] is not shardwise
    assert not hasattr(dist, "_tensor") and "torch.distributed._tensor" not in sys.modules
    theirs = [name for name in sys.modules if name.startswith("torch.distributed.tensor")]
    assert all(sys.modules[name].__name__ == name for name in theirs), theirs
    load("with")
    save("after")
    load("after")
from torch.distributed._tensor import DTensor as old_spelling
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel as of_pytorch
assert DTensor is old_spelling is not shardwise.DTensor and of_pytorch is not ColwiseParallel
assert DTensor.__module__ == "torch.distributed.tensor"
"""


def test_uninstall_puts_pytorch_back_and_files_are_read_before_and_after(tmp_path):
    for program in (WITHOUT_TAKE_OVER, AND_BACK):
        (tmp_path / "program.py").write_text(FILES + program)
        run(str(tmp_path), arguments=(str(tmp_path / "program.py"),))


def test_install_again_after_uninstall():
    run("""
    import shardwise
    shardwise.install()
    shardwise.uninstall()
    shardwise.install()
    from torch.distributed import tensor
    assert tensor is shardwise
    """)


def test_after_uninstall_an_op_on_the_dtensor_of_pytorch_says_why_it_cannot_run():
    text = run(
        """
        import torch
        import torch.distributed as dist
        import shardwise
        shardwise.install()
        shardwise.uninstall()
        from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
        x.sin()
        """,
        fails=True,
    )
    assert "aten.sin.default on PyTorch's DTensor after shardwise.uninstall()" in text
    assert "start a process without shardwise.install()" in text


@pytest.mark.parametrize(
    "first",
    [
        "from torch.distributed.tensor import DTensor",
        "from torch.distributed.tensor import distribute_tensor as d",
        "import torch.distributed.tensor as dt",
        "from torch.distributed.tensor import parallel",
    ],
)
def test_too_late_is_an_error_that_names_who_was_first(first):
    text = run(f"import shardwise\n{first}\nshardwise.install()", fails=True)
    assert "__main__" in text
    assert "have imported torch.distributed.tensor already: call shardwise.install() before any other import" in text


def test_in_time_is_after_an_import_that_holds_nothing():
    run("""
    import shardwise
    import torch.distributed.tensor
    shardwise.install()
    assert torch.distributed.tensor is shardwise
    """)


def test_a_private_module_that_is_not_there_is_an_error():
    text = run(
        """
        import shardwise
        shardwise.install()
        import torch.distributed.tensor._tp_conv
        """,
        fails=True,
    )
    assert "ModuleNotFoundError: torch.distributed.tensor._tp_conv: shardwise replaces" in text


def test_importing_and_using_shardwise_leaves_plain_tensors_alone():
    """The program compares results, kernels, settings, and all functions and classes of PyTorch, before and after."""
    names = run((PROGRAMS / "plain_tensors.py").read_text())
    places = [*functions_that_make_tensors(), *gathering_functions(), *distributing_functions()]
    # Of the writer of checkpoints, and of DistributedDataParallel, which asks what it wraps.
    wrapped = {place.name for place in places} | {"prepare_global_plan", "write_data", "__init__"}
    # Of hooks for saved tensors, which run outside of the derivative formula that reads the tensor.
    wrapped |= {"__enter__", "register_hooks"}
    # Of profilers and of DebugMode, which are shown redistributions while they are active.
    wrapped |= {"_run_on_profiler_start", "_run_on_profiler_stop", "__enter__", "__exit__"}
    assert set(names.split()) == wrapped


def test_other_tensors_are_left_alone():
    run("""
    import torch
    class Doubled(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return torch.ones(2)
    calls = []
    import shardwise
    shardwise.install()
    x = torch.Tensor._make_wrapper_subclass(Doubled, (2,))
    assert torch.equal(x + 1, torch.ones(2)) and calls == [torch.ops.aten.add.Tensor]
    """)


SPAWNS = """
import sys
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

def work(rank):
    print(f"{rank} {DTensor.__module__} {sys.argv[1:]}", flush=True)

if __name__ == "__main__":
    work(-1)
    mp.spawn(work, nprocs=1)
"""
EXPECTED = "-1 shardwise.tensor.dtensor ['a', '-b']\n0 shardwise.tensor.dtensor ['a', '-b']\n"


def test_run_a_file_and_the_processes_it_spawns(tmp_path):
    (tmp_path / "program.py").write_text(SPAWNS)
    command = [sys.executable, "-m", "shardwise.run", str(tmp_path / "program.py"), "a", "-b"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == EXPECTED


def test_run_a_module_of_a_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 1")
    (package / "train.py").write_text("from . import NAME\n" + SPAWNS)
    command = [sys.executable, "-m", "shardwise.run", "-m", "package.train", "a", "-b"]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout == EXPECTED


def test_run_without_a_program_says_how():
    found = subprocess.run([sys.executable, "-m", "shardwise.run"], capture_output=True, text=True, check=False)
    assert "python -m shardwise.run program.py" in found.stderr
