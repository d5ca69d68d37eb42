"""Every public function and class has an example in its docstring, and the examples run and are true.

An example may use the names of `COMMON`, which are the same for all, and those that `SETUP` defines for it. Output that
an example shows must be equal; `...` stands for any text. Without output, the code only has to run.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.ops.sequence_options import options
from shardwise.rules import registry
from shardwise.tensor.gradient_buckets import bucket_size

MODULES = (
    "shardwise", "shardwise.checkpoint", "shardwise.debug", "shardwise.dropin", "shardwise.erasing",
    "shardwise.experimental", "shardwise.extend", "shardwise.fsdp", "shardwise.hub", "shardwise.interop",
    "shardwise.nn", "shardwise.parallel", "shardwise.pipeline", "shardwise.random", "shardwise.rules",
    "shardwise.testing", "shardwise.transferring", "shardwise.verifying", "shardwise.world",
)  # fmt: skip

# `Draw` is what a local call gets as its generator; IPython calls the other one.
WITHOUT_EXAMPLE = {"shardwise.random.Draw", "shardwise.debug.load_ipython_extension"}

COMMON = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = distribute_tensor(torch.arange(32.0).view(8, 4), mesh, P("dp", "tp"))
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
"""
LINE = 'mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))\n'
QUERIES = LINE + "q, k, v = (shardwise.randn(1, 4, 64, 8, device_mesh=mesh, placements=[Shard(2)]) for _ in range(3))"
PROGRAM = """
def build_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
def apply(model, mesh):
    styles = {"0": shardwise.parallel.ColwiseParallel(), "2": shardwise.parallel.RowwiseParallel()}
    return shardwise.parallel.parallelize_module(model, mesh, styles)
def apply_wrongly(model, mesh):
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return apply(model, mesh)
tokens, targets = torch.randn(6, 4), torch.randint(4, (6,))
"""
STAGES = """
from shardwise.parallel import ColwiseParallel, parallelize_module
from shardwise.fsdp import fully_shard
first, second, loss = nn.Linear(4, 8), nn.Linear(8, 4), F.cross_entropy
PLAN = {"": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
tokens, targets = torch.randn(8, 4), torch.randint(4, (8,))
"""
SETUP = {
    "shardwise.accumulate_gradients": """
distribute_module(model, mesh)
batches = [distribute_tensor(torch.ones(2, 4), mesh, P("dp")) for _ in range(2)]
""",
    "shardwise.bucket_gradients": 'loss = distribute_module(model, mesh)(x.redistribute(placements=P("dp"))).sum()',
    "shardwise.debug.budget": "x = torch.ones(2, 4)",
    "shardwise.debug.unwatched": "log = lambda *_: None",
    "shardwise.erase": """
def train_step(batch):
    return (batch * 2).sum()
batch = torch.ones(4)
""",
    "shardwise.experimental.context_parallel": """
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
tokens, labels = torch.randn(1, 8, 4), torch.randint(4, (1, 8))
model, loss = nn.Linear(4, 4), lambda scores, labels: F.cross_entropy(scores.flatten(0, 1), labels.flatten())
""",
    "shardwise.extend": """
def my_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)
""",
    "shardwise.fsdp.register_fsdp_forward_method": """
class Block(nn.Linear):
    def generate(self, x):
        return self.forward(x)
block = Block(4, 8)
""",
    "shardwise.hub.load": "make_model = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))",
    "shardwise.interop": """
import torch.distributed.tensor
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
theirs = torch.distributed.tensor.distribute_tensor(torch.ones(4), mesh, [torch.distributed.tensor.Shard(0)])
their_module = nn.Module()
""",
    "shardwise.nn.attention_over_sequence": QUERIES,
    "shardwise.nn.choose_method": QUERIES,
    "shardwise.nn.packed_attention": LINE,
    "shardwise.nn.unzigzag": LINE,
    "shardwise.nn.zigzag": LINE,
    "shardwise.parallel.ExpertParallel": """
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
moe = nn.Module()
moe.experts = nn.Module()
moe.experts.weight = nn.Parameter(torch.randn(8, 4, 4))
""",
    "shardwise.parallel.hub_plan": 'model.tp_plan = {"0": "colwise", "2": "rowwise"}',
    "shardwise.parallel.loss_parallel": """
logits = distribute_tensor(torch.randn(6, 8), mesh, P(None, "tp")).requires_grad_()
target = torch.randint(8, (6,))
""",
    "shardwise.pipeline.Pipeline": STAGES,
    "shardwise.rules.refine": "from shardwise.sharding.layout import Factor, Layout",
    "shardwise.transfer": """
trainer, generator_mesh = distribute_module(model, mesh), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
plan = {name: P("tp") for name in trainer.state_dict()}
""",
    "shardwise.verify": PROGRAM,
    "shardwise.verifying.Difference": PROGRAM,
    "shardwise.verifying.Report": PROGRAM,
}  # fmt: skip
SETUP["shardwise.interop.from_torch"] = SETUP["shardwise.interop.to_torch"] = SETUP["shardwise.interop"]
RANKS = {"shardwise.pipeline.Pipeline": 8, "shardwise.pipeline.stage_meshes": 8, "shardwise.nn.zigzag": 2}
ONE_PROCESS = {name for name in SETUP if "interop" in name} | {"shardwise.experimental.context_parallel"}
NEW_PROGRAM = {"shardwise.install", "shardwise.uninstall", "shardwise.dropin", "shardwise.dropin.installed"}


def public() -> dict[str, object]:
    """The public names that are defined by shardwise, by the first path at which they are found, and the modules."""
    found: dict[str, object] = {}
    for path in MODULES:
        module = importlib.import_module(path)
        found[path] = module
        for name in module.__all__:
            value = inspect.unwrap(getattr(module, name)) if callable(getattr(module, name)) else None
            is_ours = str(getattr(value, "__module__", "")).startswith("shardwise")
            if is_ours and not any(value is other for other in found.values()):
                found[f"{path}.{name}"] = value
    return found


PUBLIC = public()


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def names_of(path: str) -> dict[str, object]:
    """What examples may use: the public names of the package, then those of the module."""
    names: dict[str, object] = {"torch": torch, "nn": nn, "F": F, "dist": dist, "shardwise": shardwise}
    for module in (shardwise, sys.modules[path if path in MODULES else path.rpartition(".")[0]]):
        names |= {
            name: value
            for name in module.__all__
            if not isinstance(value := getattr(module, name), types.ModuleType) or name == "registry"
        }
    return names


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Checker(doctest.OutputChecker):
    """Compares output only where an example shows some."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@contextlib.contextmanager
def example_op() -> Iterator[None]:
    """Define the op that examples of rules are about, unless a page of the documentation has defined it."""
    if hasattr(torch.ops.mylib, "scale_rows"):
        yield
        return
    library = torch.library.Library("mylib", "FRAGMENT")
    library.define("scale_rows(Tensor x, Tensor factors) -> Tensor")
    for key in ("CPU", "Meta"):
        library.impl("scale_rows", lambda x, factors: x * factors[:, None], key)
    try:
        yield
    finally:
        library._destroy()
        vars(torch.ops.mylib).pop("scale_rows", None)  # the packet that was looked up


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[None]:
    """What examples change for the process or the thread is put back."""
    model, attention, nbytes = shardwise.cost_model(), replace(options), bucket_size()
    try:
        with registry.restored(), example_op():
            yield
    finally:
        shardwise.set_cost_model(model)
        vars(options).update(vars(attention))
        shardwise.bucket_gradients(nbytes)


@pytest.mark.parametrize("path", PUBLIC)
def test_has_an_example(path: str) -> None:
    value = PUBLIC[path]
    if isinstance(value, types.ModuleType) or is_error(value) or path in WITHOUT_EXAMPLE:
        return
    assert ">>> " in (inspect.getdoc(value) or ""), f"the docstring of {path} has no example"


@pytest.mark.parametrize("path", [path for path, value in PUBLIC.items() if ">>> " in (inspect.getdoc(value) or "")])
def test_example(path: str, restored: None, tmp_path: Path) -> None:
    text = inspect.getdoc(PUBLIC[path]) or ""
    if path in NEW_PROGRAM:
        code = "import shardwise\nfrom shardwise.dropin import *\n"
        code += "".join(example.source for example in doctest.DocTestParser().get_examples(text))
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
        return
    names: dict[str, object] = {}
    with one_process() if path in ONE_PROCESS else shardwise.simulate(RANKS.get(path, 4)):
        own = names_of(path)
        names |= own | {"folder": tmp_path}
        common = "" if path in ONE_PROCESS or path in RANKS else COMMON
        exec(common + SETUP.get(path, ""), names)
        names |= {name: own[name] for name in own if name not in SETUP.get(path, "")}
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
        runner = doctest.DocTestRunner(Checker(), optionflags=flags, verbose=False)
        failures: list[str] = []
        example = doctest.DocTestParser().get_doctest(text, names, path, None, None)
        runner.run(example, out=failures.append)
    assert not failures, "".join(failures)
