"""Every collective of PyTorch has a record, and its positions are those of the schema."""

import pytest
import torch
import torch.distributed._functional_collectives

from shardwise.ops.collectives import collective_of, communicates
from shardwise.ops.trivial import computes_nothing

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
BETWEEN_TWO = {"isend", "irecv", "batch_p2p_ops", "recv_any_source_"}
WITHOUT_DATA = {"barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}


def every_op() -> list[torch._ops.OpOverload]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    names = sorted(name for name in names if name.partition("::")[0] in NAMESPACES)
    packets = [getattr(getattr(torch.ops, space), op) for space, _, op in (name.partition("::") for name in names)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


@pytest.mark.parametrize("func", every_op(), ids=str)
def test_records(func) -> None:
    name = func._schema.name.partition("::")[2]
    record = collective_of(func)
    assert (record is None) == (name in BETWEEN_TWO | WITHOUT_DATA)
    assert communicates(func) == (name not in WITHOUT_DATA)
    if record is None:
        return
    types = [str(argument.type) for argument in func._schema.arguments]
    assert "Tensor" in types[0]
    assert "Tensor" in types[record.input]
    assert record.writes_first == (func.namespace == "c10d")
    assert (record.splits is not None) == any("split_sizes" in a.name for a in func._schema.arguments)
    if record.splits is not None:
        assert func._schema.arguments[record.splits].name == "output_split_sizes"


def test_other_ops_have_no_record() -> None:
    assert collective_of(torch.ops.aten.add.Tensor) is None


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (torch.ops.aten.view.default, True),
        (torch.ops.aten.empty_like.default, True),
        (torch.ops._c10d_functional.wait_tensor.default, True),
        (torch.ops.aten.zeros_like.default, False),
        (torch.ops.aten.add_.Tensor, False),
    ],
    ids=str,
)
def test_ops_that_compute_nothing(func, expected) -> None:
    assert computes_nothing(func) is expected
