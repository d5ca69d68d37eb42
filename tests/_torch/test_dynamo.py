"""Dynamo is configured when it is imported: what it must not trace, and which objects are constants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise import Replicate, Shard
from shardwise._torch.dynamo import (
    break_graph,
    compiles,
    constant_in_graphs,
    forget_last_trace,
    in_graph,
    real_object,
)
from shardwise.sharding.spec import contiguous_meta


def test_importing_shardwise_does_not_import_dynamo() -> None:
    program = """
import sys, torch, shardwise
assert "torch._dynamo" not in sys.modules
import torch._dynamo
from torch._dynamo import trace_rules
assert trace_rules.check(shardwise.DTensor.redistribute)
assert trace_rules.is_callable_allowed(shardwise.DTensor.from_local)
assert not any(type(finder).__module__.startswith("shardwise._torch") for finder in sys.meta_path)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


def test_code_of_the_package_is_not_traced() -> None:
    from torch._dynamo import trace_rules

    package = Path(shardwise.__file__).parent
    assert trace_rules.check_file(str(package / "tensor" / "dtensor.py"), True).skipped
    assert not trace_rules.check_file(str(package / "parallel" / "hooks.py"), True).skipped


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="graphs of PyTorch 2.11 hold no such constants")
def test_constants_and_calls() -> None:
    @constant_in_graphs
    class Factor:
        def __init__(self, number: float) -> None:
            self.number = number

    @in_graph
    def scaled(x: torch.Tensor, factor: Factor) -> torch.Tensor:
        return x * factor.number

    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    factor = Factor(3.0)
    function = torch.compile(lambda x: scaled(x, factor) + 1, backend=backend, fullgraph=True)
    torch.testing.assert_close(function(torch.ones(2)), torch.full((2,), 4.0))
    assert any(node.target is scaled for node in graphs[0].graph.nodes)
    torch.compiler.reset()


def test_code_of_a_placement() -> None:
    for placement in (Shard(1), Replicate(), shardwise.Partial("max"), shardwise.P("tp", partial={"dp": "sum"})):
        code, names = placement.__fx_repr__()
        assert eval(code, dict(names)) == placement


def test_breaking_a_graph() -> None:
    assert not compiles()
    break_graph("not while nothing is traced")
    with torch._guards.tracing(torch._guards.TracingContext(None)):
        assert compiles()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="no graph"):
            break_graph("no graph")


def test_the_object_behind_a_stand_in() -> None:
    meta = contiguous_meta(torch.Size([2]), torch.float32)
    assert real_object(meta) is meta


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_is_kept_of_the_last_trace_is_forgotten() -> None:
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental import proxy_tensor

    torch.compile(lambda x: x * 2, backend="aot_eager")(torch.ones(2))
    torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    assert isinstance(PhiloxStateTracker.fwd_state.seed, FakeTensor)
    assert proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT
    forget_last_trace()
    assert not isinstance(PhiloxStateTracker.fwd_state.seed, FakeTensor)
    assert not proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT
    torch.compiler.reset()
