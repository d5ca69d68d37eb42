"""What the watch needs of PyTorch."""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise._torch.collectives import all_reduce, wait
from shardwise._torch.watching import (
    abort_group,
    all_groups,
    functional_collectives,
    own_store,
    store_port,
    wrap_op,
)
from shardwise.ops.recorded import STARTS
from tests.worlds import fake_group


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_calls_of_an_op_are_seen_until_that_is_undone() -> None:
    seen, key = [], hash(all_reduce)
    with fake_group(2):
        name = dist.group.WORLD.group_name
        undo = wrap_op(all_reduce, lambda args, kwargs: seen.append(args[1:]))
        assert hash(all_reduce) == key
        assert all_reduce in STARTS
        wait(all_reduce(torch.ones(2), "sum", name))
        with Passing():
            wait(all_reduce(torch.ones(2), "sum", name))
        undo()
        wait(all_reduce(torch.ones(2), "sum", name))
    assert seen == 2 * [("sum", name)]


def test_the_functional_collectives_are_there() -> None:
    assert {op for op in functional_collectives() if isinstance(op, torch._ops.OpOverload)} >= STARTS


def test_the_store_and_the_groups() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=server, rank=0, world_size=1)
    try:
        store = own_store()
        assert store_port() == server.port
        store.set("key", "value")
        assert own_store().get("key") == b"value"
        assert all_groups() == [dist.group.WORLD]
        abort_group(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert store_port() is None
    finally:
        dist.destroy_process_group()
