"""Deadlines, against a plain dict."""

from __future__ import annotations

import random

from baton.deadlines import Deadlines


def test_it_says_what_a_plain_dict_says() -> None:
    draw = random.Random(1)
    deadlines, plain = Deadlines[int](), dict[int, float]()
    for now in range(3000):
        key, when = draw.randrange(200), float(now + draw.randrange(400))
        if draw.random() < 0.7:
            deadlines.set(key, when)
            plain[key] = when
        else:
            deadlines.discard(key)
            plain.pop(key, None)
        if draw.random() < 0.1:
            due = deadlines.due(now)
            assert sorted(due) == sorted(key for key in plain if plain[key] <= now)
            assert [plain[key] for key in due] == sorted(plain[key] for key in due), "not the earliest first"
            for key in due:
                del plain[key]
        assert len(deadlines) == len(plain)
        assert deadlines.next() == min(plain.values(), default=None)
        assert (key in deadlines) == (key in plain)


def test_a_key_that_was_moved_is_due_once_and_at_its_last_deadline() -> None:
    deadlines = Deadlines[str]()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    deadlines.set("b", 2.0)
    assert deadlines.due(4.0) == ["b"]
    deadlines.set("a", 4.5)
    assert deadlines.due(4.5) == ["a"]
    assert deadlines.next() is None


def test_what_was_discarded_or_moved_takes_no_memory_for_long() -> None:
    deadlines = Deadlines[int]()
    deadlines.set(-1, 0.0)  # on top of all
    for key in range(100_000):
        deadlines.set(key % 10, 1e6 + key)
        deadlines.set(key, 1e6)
        deadlines.discard(key)
    assert len(deadlines._heap) <= 64
