"""Where parameters lie in flat buffers."""

from __future__ import annotations

import pytest
import torch

from shardwise.fsdp.memory import arrange, view_of

GPT2_BLOCK = [
    (768,),
    (768,),
    (2304, 768),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (3072, 768),
    (3072,),
    (768, 3072),
]
GPT2_REST = [(50257, 768), (1024, 768), (768,), (768,)]
LLAMA_BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


@pytest.mark.parametrize("ranks", [2, 6, 8, 64])
@pytest.mark.parametrize("shapes", [GPT2_BLOCK, GPT2_REST, LLAMA_BLOCK])
def test_padding_is_below_one_percent(shapes: list[tuple[int, ...]], ranks: int) -> None:
    assert arrange(shapes, ranks, align=4).padding() < 0.01


def test_pieces_lie_one_after_the_other() -> None:
    found = arrange([(10, 4), (3,), (8, 2)], ranks=4, align=1)
    assert [(piece.rows, piece.start, piece.gathered_start) for piece in found.pieces] == [
        (3, 0, 0),
        (1, 12, 48),
        (2, 13, 52),
    ]
    assert (found.numel, found.gathered_numel) == (17, 68)
    assert [found.pieces[0].held(index) for index in range(4)] == [3, 3, 3, 1]
    assert [found.pieces[1].held(index) for index in range(4)] == [1, 1, 1, 0]


def test_pieces_start_at_multiples() -> None:
    found = arrange([(7,), (5, 3)], ranks=2, align=4)
    assert [piece.start % 4 for piece in found.pieces] == [0, 0]
    assert [piece.gathered_start % 4 for piece in found.pieces] == [0, 0]


def test_a_view_has_the_first_dim_where_it_belongs() -> None:
    buffer = torch.arange(100)
    expected = buffer[10:34].view(4, 2, 3)
    for dim in range(3):
        assert torch.equal(buffer.as_strided(*view_of((4, 2, 3), dim, 10)), expected.movedim(0, dim))
