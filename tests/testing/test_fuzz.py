"""Random programs: a quick part of `make fuzz`, a sample on processes, and faults on purpose that it must find."""

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch

from shardwise.ops.registry import registry
from shardwise.testing.fuzz import Program, batch, generate, replay
from shardwise.testing.fuzz.__main__ import main, text_of
from shardwise.testing.fuzz.batch import Report, batches, run_all, run_batch
from shardwise.testing.fuzz.compare import Failure, close
from shardwise.testing.fuzz.draw import GLOO_MESHES, Draw, NoChoice
from shardwise.testing.fuzz.processes import Found, Held, compare_rank, different, raised_by_some
from shardwise.testing.fuzz.program import reads, renamed, target, without
from shardwise.testing.fuzz.shrink import shrink
from shardwise.testing.fuzz.statements import writes
from shardwise.testing.fuzz.trial import alone
from tests.processes.pool import on_processes

WRITES = (
    writes.in_place,
    writes.in_place_of_two,
    writes.without_gradient,
    writes.assigned,
    writes.scattered,
    writes.into_out,
)
BATCHES = batches(range(200, 500))


@pytest.mark.parametrize("seeds", BATCHES, ids=[f"{len(seeds)} from seed {seeds[0]}" for seeds in BATCHES])
def test_programs(seeds: tuple[int, ...]) -> None:
    answer = run_batch(seeds, ())
    assert not answer.reports, "\n".join(map(text_of, answer.reports))


@on_processes
def test_programs_on_processes() -> None:
    compare_rank([generate(seed, GLOO_MESHES) for seed in range(12)])


def test_a_seed_is_a_program() -> None:
    assert generate(5) == generate(5)
    assert generate(5) != generate(6)


# ---- faults on purpose ----------------------------------------------------------------------------------------------

WRONG = Program(
    3,
    (2, 2),
    (
        'x0 = leaf((4, 3), torch.float32, [Partial("sum"), Shard(0)], seed=1, grad=True)',
        "x1 = leaf((3,), torch.float32, [Replicate(), Replicate()], seed=2)",
        "x2 = x0 * x1",
        "x3 = x2.sin()",
        "x4 = x3.transpose(0, 1)",
        "(x4.cos().sum()).backward()",
    ),
)


def test_a_wrong_rule_is_found_and_the_program_is_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert alone(WRONG, ()) is None
    with registry.restored():
        registry.register("aten::sin", "x.. -> x.. ; linear 0")  # a sum of sines is not the sine of a sum
        failure = alone(WRONG, ())
        assert failure is not None
        assert failure.kind == "value"
        smallest, found = shrink(WRONG, failure, lambda program: alone(program, ()))
        assert len(smallest.lines) == 2
        assert smallest.mesh == (2,)
        assert "Partial" in smallest.lines[0]
        assert ".sin()" in smallest.lines[1]
        exec(text_of(Report(3, found, smallest)), {})
    shown = capsys.readouterr().out
    assert "---- distributed tensors" in shown
    assert "---- value of x3" in shown


def test_errors_are_compared() -> None:
    raising = Program(0, (2,), ("x0 = leaf((3,), torch.float32, [Shard(0)], seed=1)", "x1 = x0.view(5)"))
    assert alone(raising) is None
    wrong = dataclasses.replace(raising, lines=(*raising.lines, "x2 = x0.to_local()"))
    failure = alone(wrong)
    assert failure is not None
    assert failure.kind == "error"


@pytest.mark.parametrize("statement", WRITES, ids=[statement.__name__ for statement in WRITES])
def test_nothing_is_written_through_windows_that_overlap(statement: Callable[[Draw], str]) -> None:
    """In which order a write in place visits elements that share memory is not defined."""
    for seed in range(50):
        draw = Draw(seed)
        for name, dtype in (("x0", torch.float32), ("x1", torch.float32), ("x2", torch.int64)):
            memory = torch.zeros(4, 3, dtype=dtype, requires_grad=name == "x0")
            draw.variables[name] = memory.unfold(0, 2, 1)[:, :2]
        with pytest.raises(NoChoice):
            statement(draw)


def test_rounding_is_no_difference() -> None:
    """0.1 in thirds: the floor of a sum that is an integer on one device may be the integer before."""
    assert (
        replay(
            (3,),
            0,
            """
        x0 = leaf((3,), torch.float32, [Shard(0)], seed=1)
        x1 = torch.full_like(x0, 0.1) * 10 / 3
        x2 = x1.sum().floor()
    """,
        )
        is None
    )


UNDEFINED = {
    "the strides of a sum with a derivative that is known to be zero": (
        "x2 = leaf((1, 2, 2), torch.float32, [Replicate()], seed=803, grad=True)",
        "x4 = torch.matmul(x2, x2.mT)",
        "x7 = torch.linalg.matrix_norm(x2, 1)",
        "x8 = torch.autograd.grad(x4.sum() + (x7 * 0.5).sum(), x2, create_graph=True)[0]",
        "x9 = torch.autograd.grad((x8 ** 2).sum(), x2)[0]",
    ),
    "which of equal numbers topk chooses": (
        "x0 = leaf((6, 6), torch.float32, [Shard(1)], seed=713, grad=True)",
        "x2 = x0.topk(2, 1).values",
        "((x2 * x2).sum()).backward()",
    ),
    "the side of a branch cut, of a product": (
        'x1 = leaf((6, 5), torch.complex64, [Partial("product")], seed=74)',
        "x1.sqrt_()",
    ),
    "the sign of a zero that is a product": (
        'x0 = leaf((), torch.float32, [Partial("product")], seed=835)',
        "x1 = leaf((1, 1, 1, 1), torch.float32, [Replicate()], seed=397)",
        "x1.div_(x0)",
    ),
    "the sign of infinity, divided by a zero that is a sum of terms": (
        'x2 = leaf((1, 2, 1), torch.float32, [Partial("sum")], seed=684, special=True)',
        "x3 = x2.count_nonzero()",
        "x4 = torch.addcdiv(x3, x3, x2)",
    ),
    "a product that overflows in one order, with a zero": (
        "x1 = leaf((8, 2, 3), torch.float16, [Shard(1)], seed=433)",
        "x3 = x1.prod()",
    ),
    "a sum that overflows in one order": (
        "x2 = leaf((2, 8), torch.float16, [Shard(0)], seed=819, grad=True)",
        "x4 = torch.mm(x2, x2.mT)",
        "x6 = torch.matmul(x4, x4)",
        "((x6 * x6).sum()).backward(retain_graph=True)",
    ),
    "terms of a sum, times infinity": (
        "x0 = leaf((4, 3), torch.int64, [Replicate()], seed=979)",
        'x1 = leaf((1, 1, 4), torch.float32, [Partial("sum")], seed=328)',
        "x3 = x0.reciprocal()",
        "x7 = torch.matmul(x1, x3)",
    ),
    "the gradient of a leaf that has another shape by then": (
        "x1 = leaf((1, 2), torch.float32, [Replicate()], seed=57, grad=True)",
        "x3 = F.pad(x1, (1, 1))",
        "with torch.no_grad(): x1.squeeze_()",
        "(x3.sum()).backward()",
    ),
    "a number and the average of three of it": (
        "x1 = leaf((5,), torch.complex64, [Replicate()], seed=533)",
        "x3 = x1 / 5",
        'x5 = move(x3, [Partial("avg")])',
        "x5.eq_(x3)",
    ),
    "a divisor that cancels": (
        "x0 = leaf((1, 4, 5), torch.bfloat16, [Shard(1)], seed=869)",
        "x2 = torch.logaddexp(x0, x0)",
        "x3 = x2.nansum(-2)",
        "x6 = torch.addcdiv(x2, x2, x3)",
    ),
    "the sign of an element that equals the mean": (
        "x0 = leaf((4, 5, 1), torch.float32, [Shard(0)], seed=365)",
        "x4 = F.batch_norm(x0, None, None, training=True)",
        "x5 = x4.masked_fill(x4 > 0, 2)",
    ),
    "zero by zero, or almost": (
        "x0 = leaf((6, 4, 4), torch.bfloat16, [Shard(2)], seed=708)",
        "x0.atan2_(x0)",
        "x1 = torch.bmm(x0, x0)",
        'x3 = torch.div(x1, x1, rounding_mode="floor")',
    ),
    "the sign of a zero that is an average": (
        'x0 = leaf((1, 6, 2), torch.float32, [Partial("avg")], seed=346, special=True)',
        "x1 = leaf((1, 6, 2), torch.float32, [Replicate()], seed=346, special=True)",
        'x2 = move(x1, [Partial("sum")])',
        "x3 = torch.atan2(x2, x2)",
        "x0.atan2_(x0)",
    ),
    "the mean of infinity and a number, in one pass with the variance": (
        "x1 = leaf((2, 2), torch.float32, [Shard(1)], seed=35, special=True)",
        "x4 = torch.var_mean(x1, 1)[1]",
        "x5 = torch.std_mean(x1.flip(1), 1)[1]",
    ),
    "a bilinear form that overflows in one order": (
        "x1 = leaf((8, 8), torch.float16, [Replicate()], seed=601)",
        "x3 = leaf((8, 6), torch.float16, [Shard(1)], seed=646)",
        "x4 = x1 @ x3",
        "x6 = torch.diff(x4, dim=-2)",
        "x12 = F.bilinear(x4, x4, x6[None].mT @ x6)",
    ),
    "attention of NaN": (
        "x2 = leaf((1, 1, 2, 3), torch.float32, [Shard(2)], seed=23)",
        "x2.sqrt_()",
        "x4 = F.scaled_dot_product_attention(x2, x2, x2, is_causal=False)",
    ),
    "a probability of one, or a little more": (
        "x0 = leaf((1, 5), torch.float32, [Shard(1)], seed=712)",
        "x2 = leaf((1, 1), torch.float32, [Replicate()], seed=426)",
        "x4 = torch.sub(x0, x0, alpha=3)",
        "x4.narrow(1, 0, 1).sub_(0.5)",
        "x6 = torch.full_like(x4, 3)",
        "x9 = F.normalize(x6, dim=-1)",
        "x13 = torch.bernoulli(torch.chain_matmul(x9, x9.mT))",
    ),
    "the sign of NaN": (
        'x0 = leaf((), torch.float32, [Partial("min")], seed=736, special=True)',
        "x1 = torch.signbit(x0)",
    ),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_what_is_undefined_is_no_difference(name: str) -> None:
    for mesh in ((1,), (2,), (3,)):
        assert alone(Program(1, mesh, UNDEFINED[name])) is None


def test_numbers_are_compared_up_to_their_precision() -> None:
    value = torch.tensor([1.0, 1000.0, float("nan"), float("inf")])
    assert close(value * (1 + 1e-6), value)
    assert not close(value * (1 + 1e-3), value)
    assert not close(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_a_crash_is_reported_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that crashes when it runs, one that crashes when it is generated, and one that crashes if shrunk."""

    def crash(*_: object) -> None:
        os.abort()

    monkeypatch.setattr(batch, "trial", lambda program, *_: os.abort() if program.seed == 501 else None)
    [crashed] = [report for answer in run_all(range(500, 503)) for report in answer.reports]
    assert (crashed.seed, crashed.failure.where) == (501, "the process")
    assert crashed.program == generate(501)

    monkeypatch.setattr(batch, "trial", lambda program, *_: Failure("value", "x0", "wrong"))
    monkeypatch.setattr(batch, "alone", crash)
    [unshrunk] = [report for answer in run_all([501]) for report in answer.reports]
    assert (unshrunk.failure.kind, unshrunk.program) == ("value", generate(501))

    monkeypatch.setattr(batch, "generate", crash)
    [unknown] = [report for answer in run_all([501]) for report in answer.reports]
    assert (unknown.seed, unknown.failure.where) == (501, "the generator, on plain tensors")


def test_lines() -> None:
    lines = ("x0 = leaf((), torch.float32, [], seed=0)", "x1 = x0 + x0", "x0.zero_()", "x2 = x1 * 2")
    assert target(lines[1]) == "x1"
    assert target(lines[2]) is None
    assert reads(lines[1]) == {"x0"}
    assert renamed(lines[3], "x1", "x0") == "x2 = x0 * 2"
    assert without(lines, 1) == (lines[0], lines[2])


def test_processes_are_compared_bit_by_bit() -> None:
    one, other = torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])
    simulated, found = Found({}, {"x0": Held("", one)}), Found({}, {"x0": Held("", other)})
    assert not different([simulated, simulated], simulated)
    assert different([simulated, simulated], found)
    assert not different([simulated, found], found)  # depends on the order of a sum
    assert different([simulated], Found({0: "RuntimeError"}, {}))


def test_errors_of_one_ranks_data_are_raised_on_that_rank_alone() -> None:
    simulated = Found({2: "RuntimeError"}, {})
    assert raised_by_some(simulated, [Found({}, {}), simulated])
    assert not raised_by_some(simulated, [simulated, simulated])
    assert not raised_by_some(simulated, [Found({}, {}), Found({}, {})])
    assert not raised_by_some(simulated, [simulated, Found({3: "RuntimeError"}, {})])


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "4", "--seed", "0", "--ignore", "stride,offset"]) == 0
    assert "4 programs from seed 0: all as on one device" in capsys.readouterr().out


def test_reports_are_scripts() -> None:
    text = text_of(Report(7, Failure("value", "x1", "..."), Program(7, (2,), ("x0 = 1",)), history=(3, 5)))
    assert text.startswith("# seed 7: value of x1: ...\n# only after the programs with the seeds [3, 5]\n")
    compile(text, "script", "exec")
