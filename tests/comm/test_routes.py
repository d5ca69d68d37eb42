"""Boxes and routes, checked element by element."""

from __future__ import annotations

import itertools
import random

import torch

from shardwise.comm.boxes import Box, Segment, cut_boxes, intersection, volume
from shardwise.comm.packing import received_box, sent_box
from shardwise.comm.routes import Holding, Route
from shardwise.sharding.layout import Factor, Layout


def elements(boxes: list[Box], shape: tuple[int, ...]) -> list[int]:
    """The elements of boxes of a tensor that counts its elements, one box after the other."""
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    return [index for box in boxes for index in sent_box(numbers, box).flatten().tolist()]


def test_any_range_of_the_elements_of_boxes_is_boxes() -> None:
    shape = (3, 4, 2)
    boxes: list[Box] = [
        tuple((0, 0, size) for size in shape),
        ((1, 0, 2), (1, 0, 3), (1, 0, 1)),
        ((0, 0, 1), (0, 0, 1), (0, 0, 1)),
    ]
    every = elements(boxes, shape)
    assert len(every) == volume(boxes)
    for low, high in itertools.combinations_with_replacement(range(len(every) + 1), 2):
        found = list(cut_boxes(boxes, low, high))
        assert elements(found, shape) == every[low:high]
        assert all(length > 0 for box in found for _, _, length in box)
    assert list(cut_boxes([()], 0, 1)) == [()]


def test_a_segment_of_another_tensor() -> None:
    """Rows 1 to 4 of a tensor of 6 are rows 5 to 8 of one of 12."""
    source, target = torch.arange(12).view(6, 2), torch.full((12, 2), -1)
    segment = Segment(0, 1, 5, 4)
    held = {0: ((0, 3),), 1: ((3, 6),)}
    needed = {0: ((0, 1), (6, 8)), 1: ((1, 6), (8, 12))}
    for (_, have), (_, need) in itertools.product(held.items(), needed.items()):
        local = torch.cat([source[low:high] for low, high in have])
        into = torch.cat([target[low:high] for low, high in need])
        for box in intersection([have, ((0, 2),)], [need, ((0, 2),)], segment):
            received_box(into, box).copy_(sent_box(local, box))
        start = 0
        for low, high in need:
            target[low:high] = into[start : start + high - low]
            start += high - low
    expected = torch.full((12, 2), -1)
    expected[5:9] = source[1:5]
    assert torch.equal(target, expected)


def test_replicas_share_the_sending_and_few_senders_serve_a_receiver() -> None:
    whole = Layout.make((4,), ((Factor(10, ()),), (Factor(3, ()),)))
    rows = Layout.make((2,), ((Factor(10, (0,)),), (Factor(3, ()),)))
    have = Holding.of(whole, [(rank, (rank,)) for rank in range(4)])
    need = Holding.of(rows, [(6, (0,)), (7, (1,))])
    route = Route([(have, need)])
    assert route.sent == {0: 7, 1: 8, 2: 7, 3: 8}
    assert route.received == {6: 15, 7: 15}
    assert [*route.receives(6)] == [0, 1]
    assert [*route.receives(7)] == [2, 3]
    assert sum(volume(boxes) for boxes in route.receives(6).values()) == 15
    assert route.sends(6) == route.receives(0) == {}
    assert route.own(0) == ()


def test_messages_match_on_both_sides() -> None:
    draw = random.Random(0)
    for _ in range(60):
        size, sizes = draw.randint(1, 12), (2, 3)
        layouts = [
            Layout.make(sizes, ((Factor(size, draw.choice([(), (0,), (1,), (0, 1), (1, 0)])),), (Factor(4, ()),)))
            for _ in range(2)
        ]
        places = list(itertools.product(range(2), range(3)))
        ranks = [draw.sample(range(9), 6) for _ in range(2)]
        have, need = (Holding.of(at, zip(who, places, strict=True)) for at, who in zip(layouts, ranks, strict=True))
        route = Route([(have, need)])
        for sender, receiver in itertools.permutations(range(9), 2):
            assert route.sends(sender).get(receiver) == route.receives(receiver).get(sender)
        for rank in range(9):
            assert sum(map(volume, route.sends(rank).values())) == route.sent.get(rank, 0)
            assert sum(map(volume, route.receives(rank).values())) == route.received.get(rank, 0)
