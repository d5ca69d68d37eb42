import pytest
import torch

from shardwise.errors import WorldError
from shardwise.world import RankTensor, rank_factories, rank_int, values_of


def test_equal_values_are_a_plain_int() -> None:
    assert rank_int([4, 4]) == 4
    assert isinstance(rank_int([4, 4]), int)
    assert values_of(4) is None
    assert values_of("rows") is None


def test_arithmetic_is_per_rank() -> None:
    n = rank_int([3, 2, 0])
    assert values_of(n) == (3, 2, 0)
    assert values_of(n + 1) == (4, 3, 1)
    assert values_of(1 + n) == (4, 3, 1)
    assert values_of(10 - n) == (7, 8, 10)
    assert values_of(n * n) == (9, 4, 0)
    assert values_of(n // 2) == (1, 1, 0)
    assert values_of(n % 2) == (1, 0, 0)
    assert values_of(-n) == (-3, -2, 0)
    assert values_of(n / 2) == (1.5, 1.0, 0.0)
    assert values_of(n**2) == (9, 4, 0)
    assert values_of(torch.sym_max(n, 2)) == (3, 2, 2)
    assert values_of(torch.sym_min(n, 2)) == (2, 2, 0)
    assert values_of(torch.sym_float(n)) == (3.0, 2.0, 0.0)
    assert n - n == 0
    assert repr(n) == "(3 | 2 | 0)"


def test_branches() -> None:
    n = rank_int([3, 2, 0])
    assert n >= 0
    assert n < 4
    assert n != 1
    assert n != 0  # the general size
    assert n > 1
    assert n
    for branch in (lambda: n > 2, lambda: n == 3, lambda: int(n), lambda: range(n)):
        with pytest.raises(WorldError, match=r"\| "):
            bool(branch())
    with pytest.raises(WorldError, match="3 ranks and sizes of 2"):
        _ = n + rank_int([1, 2])


def test_as_arguments_of_ops() -> None:
    x = RankTensor([torch.arange(12.0) for _ in range(3)])
    start, length = rank_int([0, 4, 8]), rank_int([4, 4, 3])
    assert [s.tolist() for s in x.narrow(0, start, length).shards] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10],
    ]
    assert [tuple(s.shape) for s in x.view(rank_int([3, 6, 1]), -1).shards] == [(3, 4), (6, 2), (1, 12)]
    assert [s.shape[0] for s in x.new_empty(rank_int([1, 2, 0])).shards] == [1, 2, 0]
    assert [s.item() for s in (x.sum() / rank_int([1, 2, 3])).shards] == [66, 33, 22]
    assert [s[0].item() for s in (x + rank_int([1, 2, 3])).shards] == [1, 2, 3]


def test_a_factory_has_no_rank_to_ask() -> None:
    x = RankTensor([torch.ones(n, 2) for n in (3, 2)])
    with pytest.raises(RuntimeError, match="concrete integers"):  # PyTorch's own words
        torch.zeros(x.shape)
    with pytest.raises(WorldError, match="new_zeros"):
        torch.arange(x.shape[0])
    with rank_factories():
        assert [tuple(s.shape) for s in torch.zeros(x.shape).shards] == [(3, 2), (2, 2)]
        assert [s.tolist() for s in torch.arange(x.shape[0]).shards] == [[0, 1, 2], [0, 1]]
        assert [s.item() for s in torch.full((), x.shape[0]).shards] == [3, 2]
        assert torch.zeros(2).tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_memory_formats(shape: tuple[int, ...]) -> None:
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    plain = RankTensor([torch.ones(n, *shape[1:]) for n in (2, 3, 0)])
    assert plain.is_contiguous()
    assert not plain.is_contiguous(memory_format=form)
    last = plain.to(memory_format=form)
    assert last.is_contiguous(memory_format=form)
    assert not last.is_contiguous()
    assert all(s.is_contiguous(memory_format=form) for s in last.shards)
    assert not plain[..., ::2].is_contiguous()
