"""Streams of events, their fingerprints, and where two of them differ."""

import random
from array import array

from shardwise.debug.watching.inquiry import first_difference
from shardwise.debug.watching.journal import Event, Journal, digest
from shardwise.debug.watching.stream import REMEMBERED, Stream, stream_key
from shardwise.debug.watching.words import disagreement, ranks_text


def rolled(events, pieces):
    stream = Stream((0, 1))
    for piece in range(pieces):
        for event in (
            events[piece::1][:0] or events[piece * len(events) // pieces : (piece + 1) * len(events) // pieces]
        ):
            stream.append(event)
        stream.roll()
    return stream


def test_the_fingerprint_does_not_depend_on_when_it_was_rolled() -> None:
    generator = random.Random(0)
    events = [generator.getrandbits(62) for _ in range(100)]
    one, other = rolled(events, 1), rolled(events, 7)
    assert one.fingerprint == other.fingerprint
    for count in (1, 13, 50, 99, 100):
        assert one.fingerprint_at(count) == other.fingerprint_at(count) == rolled(events[:count], 1).fingerprint
    assert one.fingerprint_at(101) is None


def test_events_are_remembered_and_forgotten() -> None:
    stream = rolled(list(range(1000)), 4)
    assert stream.event_at(17) == 17
    assert stream.event_at(1000) is None
    start, events = stream.events_from(990)
    assert (start, list(events)) == (990, list(range(990, 1000)))
    for _ in range(3):
        for event in range(REMEMBERED):
            stream.append(event)
        stream.roll()
    assert stream.event_at(17) is None
    assert stream.fingerprint_at(17) is None
    assert stream.count == 1000 + 3 * REMEMBERED


def sent(start, *events):
    return [start, array("Q", events).tobytes().hex()]


def test_the_first_difference() -> None:
    assert first_difference(sent(0, 1, 2, 3), sent(0, 1, 5, 3)) == 1
    assert first_difference(sent(10, 1, 2, 3), sent(11, 2, 4)) == 12
    assert first_difference(sent(0, 1, 2), sent(0, 1, 2, 3)) == 2


def test_digests_are_numbers_that_leave_room_for_a_position() -> None:
    assert digest("a") != digest("b")
    assert 0 <= digest("a") < 1 << 60
    assert stream_key((0, 1)) == stream_key([0, 1]) != stream_key((0, 2))


def test_a_journal_forgets_words_and_not_events() -> None:
    journal = Journal(0)
    for event in range(70000):
        journal.remember(event, Event("x", "y"))
    assert len(journal.events) <= 1 << 16
    assert journal.lookup(69999) == Event("x", "y")
    assert "forgotten" in journal.lookup(0).what
    assert journal.stream((1, 0)) is journal.stream((0, 1))


def test_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2, 7, 8]) == "ranks 0-2, 5, 7, 8"
    said = {0: {"what": "a", "line": "x.py:1"}, 1: {"what": None, "line": "x.py:2"}, 2: {"what": "a", "line": "x.py:1"}}
    error = disagreement(4, [0, 1, 2, 3], said)
    assert error.ranks == (1,)
    for text in (
        "ranks 0-3 disagree about call 5",
        "rank 1: has not got that far",
        "ranks 0, 2: a",
        "rank 3: no answer",
    ):
        assert text in str(error)
