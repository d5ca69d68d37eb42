"""The private names behind `_torch.wrapper`."""

import torch

from shardwise._torch.wrapper import (
    counted_as,
    make_wrapper,
    no_torch_dispatch,
    no_torch_function,
    outside_inference_mode,
    set_metadata,
)


class Wrapper(torch.Tensor):
    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func, types


def test_make_wrapper_gives_a_tensor_without_memory() -> None:
    x = make_wrapper(Wrapper, (2, 3), (3, 1), 5, dtype=torch.float16, device="cpu")
    assert type(x) is Wrapper
    assert (tuple(x.shape), x.stride(), x.storage_offset(), x.dtype) == ((2, 3), (3, 1), 5, torch.float16)


def test_ops_of_a_wrapper_arrive_at_its_class() -> None:
    x = make_wrapper(Wrapper, (2,), (1,), dtype=torch.float32)
    calls = []

    class Recording(Wrapper):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            calls.append((func, tuple(types)))
            return x

    y = make_wrapper(Recording, (2,), (1,), dtype=torch.float32)
    assert torch.neg(y) is x  # of its own class: no_torch_function does not convert it
    assert calls == [(torch.ops.aten.neg.default, (Recording,))]


def test_set_metadata_keeps_the_object() -> None:
    x = make_wrapper(Wrapper, (2, 3), (3, 1), dtype=torch.float32)
    x.mark = "kept"
    set_metadata(x, make_wrapper(Wrapper, (4,), (1,), dtype=torch.float64))
    assert (tuple(x.shape), x.dtype, x.mark) == ((4,), torch.float64, "kept")


def test_classes_without_a_dispatch_of_their_own() -> None:
    class Plain(torch.Tensor):
        pass

    assert Plain.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ is no_torch_dispatch
    assert Wrapper.__torch_dispatch__ is not no_torch_dispatch


def test_outside_inference_mode() -> None:
    with torch.inference_mode():
        with outside_inference_mode():
            counted = torch.ones(2)
        assert not counted.is_inference()
        assert torch.ones(2).is_inference()


def test_writes_to_a_plain_tensor_that_count_as_writes_to_its_wrapper() -> None:
    held = torch.ones(2)

    class Holding(torch.Tensor):
        __torch_function__ = no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            assert func is torch.ops.aten._values.default
            return held

    x = make_wrapper(Holding, (4,), (1,), dtype=torch.float32)
    alias = counted_as(x)
    assert type(alias) is torch.Tensor
    assert alias.data_ptr() == held.data_ptr()
    alias.zero_()
    assert (x._version, alias._version, held._version) == (1, 1, 0)
