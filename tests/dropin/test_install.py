"""shardwise in the place of torch.distributed.tensor, in processes of its own."""

import subprocess
import sys
import textwrap
from pathlib import Path

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
        import torch.distributed.tensor as whole
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
        assert whole is tensor is shardwise and torch.distributed.tensor.DTensor is shardwise.DTensor
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


def test_uninstall_puts_pytorch_back():
    run("""
    import shardwise
    shardwise.install()
    from torch.distributed.tensor.parallel import ColwiseParallel
    shardwise.uninstall()
    shardwise.uninstall()
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel as theirs
    assert DTensor is not shardwise.DTensor and theirs is not ColwiseParallel
    assert DTensor.__module__ == "torch.distributed.tensor"
    """)


def test_too_late_is_an_error_that_names_who_was_first():
    text = run(
        """
        import shardwise
        from torch.distributed.tensor import DTensor
        shardwise.install()
        """,
        fails=True,
    )
    assert "__main__" in text
    assert "have imported torch.distributed.tensor already: call shardwise.install() before any other import" in text


def test_a_private_module_that_is_not_there_is_an_error():
    text = run(
        """
        import shardwise
        shardwise.install()
        import torch.distributed.tensor._ops._matrix_ops
        """,
        fails=True,
    )
    assert "ModuleNotFoundError: torch.distributed.tensor._ops._matrix_ops: shardwise stands in the place" in text


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
