"""The generated table: readable, sorted, read when it is needed, and right."""

import random
import subprocess
import sys
from importlib import resources

import pytest
import torch

import shardwise
from shardwise import Shard
from shardwise.dispatch.fallback import GatherWarning
from shardwise.errors import CommunicationError
from shardwise.notation import parse
from shardwise.ops import generated
from shardwise.ops.call import Call
from shardwise.ops.generated import Line, read, read_line
from shardwise.ops.registry import resolve, rule_for
from shardwise.ops.schema import overload_key, overloads
from shardwise.ops.served import served_by
from shardwise.testing import assemble
from shardwise.testing.calls import try_call
from shardwise.testing.generate import PROBED
from shardwise.testing.recording import Recorded
from tests.ops.helpers import on, r, ranks

aten = torch.ops.aten
TEXT = resources.files("shardwise.ops").joinpath(generated.FILE).read_text()
LINES = [line for line in TEXT.splitlines() if not line.startswith("#")]


def test_sorted_and_with_the_command_that_makes_it() -> None:
    assert "`make rules`" in TEXT.splitlines()[0]
    assert sorted(LINES) == LINES
    assert len(set(LINES)) == len(LINES) > 40


def test_each_line_reads_as_it_is_written_and_serves_an_op() -> None:
    for text in LINES:
        line = read_line(text)
        assert str(line) == text
        assert str(parse(line.rule)) == line.rule
        ops = [op for op in overloads(line.op.partition(".")[0]) if overload_key(op) == line.op]
        assert all(served_by(op) == "generated" for op in ops), f"{line.op} has a rule by hand: run `make rules`"


def test_the_checker_finds_nothing_wrong() -> None:
    """One call, of the highest rank, for some of the lines, on three ranks and on two times two."""
    calls: dict[str, Recorded] = {}
    for rows in PROBED.values():
        for fn, args, kwargs in rows():
            op = fn if isinstance(fn, torch._ops.OpOverload) else fn.default
            registered = rule_for(op)
            if served_by(op) == "generated" and registered is not None:
                rule = registered.rule(Call.make(op, args, kwargs, registered.operands))
                key, most = f"{op} {rule}", args[0].dim()
                if key not in calls or calls[key].args[0].dim() < most:
                    calls[key] = Recorded(op, args, kwargs)
    assert len(calls) > 30
    for call in random.Random(0).sample(sorted(calls.values(), key=lambda call: str(call.func)), 24):
        for mesh in ((3,), (2, 2)):
            tried = try_call(call, mesh, limit=6)
            assert tried.cases, call.func
            assert not tried.failures, tried.failures[0]


def test_importing_reads_nothing() -> None:
    code = "import shardwise; from shardwise.ops import generated; print(generated.table.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


def test_lines_fit_calls_by_ranks_and_arguments() -> None:
    lines = [
        Line("aten::f.default", ("2", "-"), (("dim", [0]),), "a b, _.. -> a"),
        Line("aten::f.default", (), (), "x.."),
    ]
    assert [read_line(str(line)) for line in lines] == lines
    assert read("# a comment\n" + "\n".join(map(str, lines))) == {"aten::f.default": [str(line) for line in lines]}
    func = aten.linalg__powsum.default
    first = Line("aten::linalg__powsum.default", ("2",), (("dim", [0]),), "a b -> b")
    assert first.fits(Call.make(func, (r(3, 4), 2, [0]), {}))
    assert first.fits(Call.make(func, (r(3, 4), 2, (0,)), {}))
    assert not first.fits(Call.make(func, (r(3, 4), 2, [1]), {}))
    assert not first.fits(Call.make(func, (r(3, 4, 2), 2, [0]), {}))


def test_variants_follow_from_the_schema() -> None:
    assert served_by(aten._add_relu_.Tensor) == "generated"
    with ranks(2) as mesh, shardwise.explicit():
        x = on(mesh, r(5, 4), Shard(0))
        aten._add_relu_.Tensor(x, on(mesh, r(5, 4), Shard(0)))
        assert x.placements == (Shard(0),)
        torch.testing.assert_close(assemble(x), (r(5, 4) * 2).relu())


def test_calls_without_a_line_run_on_gathered_inputs_with_a_warning() -> None:
    op = aten._masked_softmax.default
    with ranks(2) as mesh:
        x, mask = on(mesh, r(5, 4), Shard(0)), on(mesh, r(5, 4) > 0, Shard(0))
        resolve(op).warned = False
        with shardwise.strict_ops(), pytest.raises(CommunicationError, match="has no rule, and strict_ops is on"):
            op(x, mask, 1, 2)
        with pytest.warns(GatherWarning, match="runs on gathered inputs"):
            result = op(x, mask, 1, 2)
        torch.testing.assert_close(assemble(result), op(r(5, 4), r(5, 4) > 0, 1, 2), equal_nan=True)


def test_served_by() -> None:
    kinds = {
        aten.mm.default: "rule",
        aten.add_.Tensor: "rule",
        aten._is_all_true.default: "generated",
        aten.alias_copy.default: "decomposition",
        aten.t_.default: "decomposition",
        aten.silu_backward.default: "rule",
        aten.nonzero.default: "gathered",
    }
    assert {op: served_by(op) for op in kinds} == kinds
    assert served_by(aten.equal.default, planned=False) == "decomposition"
