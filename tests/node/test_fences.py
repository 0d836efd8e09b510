"""Tombstones: what they keep out, for how long, and what they cost."""

from __future__ import annotations

import tracemalloc

import pytest

from baton.messages import AttemptId
from node import fences as module
from node.expiring_dict import ExpiringDict
from node.fences import UNDER_WAY_S, Fences

LONGEST_S = 3600.0


def attempt(number: int, request: str = "r", epoch: int = 7) -> AttemptId:
    return AttemptId(epoch, request, number)


@pytest.fixture
def fences() -> Fences:
    return Fences(LONGEST_S)


def test_an_attempt_is_taken_once_and_fences_those_below_it(fences: Fences) -> None:
    assert fences.admit(attempt(1), 0.0, 60.0)
    assert not fences.admit(attempt(1), 0.0, 60.0)
    assert not fences.admit(attempt(0), 0.0, 60.0)
    assert fences.last(attempt(0)) == attempt(1)
    assert fences.admit(attempt(2), 0.0, 60.0)
    assert fences.admit(attempt(0, "other"), 0.0, 60.0)
    assert fences.admit(attempt(0, epoch=8), 0.0, 60.0)


def test_a_late_abort_of_an_earlier_attempt_does_not_lower_the_tombstone_of_a_later_one(fences: Fences) -> None:
    assert fences.admit(attempt(1), 0.0, 60.0)
    fences.fence(attempt(0), 1.0)
    assert not fences.admit(attempt(1), 2.0, 60.0)
    fences.fence(attempt(3), 3.0)
    fences.fence(attempt(2), 4.0)
    assert not fences.admit(attempt(3), 5.0, 60.0)
    assert fences.admit(attempt(4), 5.0, 60.0)


def test_a_tombstone_outlives_the_deadline_of_its_own_request(fences: Fences) -> None:
    fences.admit(attempt(0, "short"), 100.0, 5.0)
    fences.admit(attempt(0, "long"), 100.0, 1000.0)
    fences.fence(attempt(0, "short"), 104.0)  # it is known: that says nothing new of its deadline
    fences.expire(105.0 + UNDER_WAY_S - 1)
    assert len(fences) == 2
    fences.expire(105.0 + UNDER_WAY_S + 1)
    assert len(fences) == 1
    assert not fences.admit(attempt(0, "long"), 1100.0, 1.0)
    fences.expire(1100.0 + UNDER_WAY_S + 1)
    assert len(fences) == 0


def test_of_unknown_work_it_is_kept_for_as_long_as_the_abort_says_or_longer_than_any(fences: Fences) -> None:
    fences.fence(attempt(0, "said"), 0.0, 600.0)
    fences.fence(attempt(0, "not said"), 0.0)
    fences.fence(attempt(0, "absurd"), 0.0, 1e12)
    fences.expire(600.0 + UNDER_WAY_S - 1)
    assert not fences.admit(attempt(0, "said"), 600.0, 1.0)
    fences.expire(2 * LONGEST_S)
    assert fences.admit(attempt(0, "said"), 2 * LONGEST_S, 1.0)
    assert not fences.admit(attempt(0, "not said"), 2 * LONGEST_S, 1.0)
    fences.expire(2 * LONGEST_S + 2 * UNDER_WAY_S)
    assert len(fences) == 0


def test_an_attempt_above_a_known_one_may_be_aborted_before_it_comes(fences: Fences) -> None:
    """The later attempt's deadline is not known, so the tombstone is kept for longer than the first one's."""
    fences.admit(attempt(0), 0.0, 5.0)
    fences.fence(attempt(1), 1.0)
    fences.expire(LONGEST_S)
    assert not fences.admit(attempt(1), LONGEST_S, 5.0)
    fences.expire(3 * LONGEST_S)
    assert len(fences) == 0


def test_stopped_samples_are_of_one_attempt_and_go_with_the_tombstone(fences: Fences) -> None:
    assert fences.stop_samples(attempt(1), (2,), 0.0, 60.0)
    assert fences.stopped(attempt(1)) == {2}
    assert fences.admit(attempt(1), 0.0, 60.0), "a stopped sample counted as seen"
    assert fences.stop_samples(attempt(1), (0,), 1.0, 60.0)
    assert fences.stopped(attempt(1)) == {0, 2}
    assert not fences.stopped(attempt(2))
    assert fences.stop_samples(attempt(0), (1,), 1.0, 60.0)
    assert not fences.stopped(attempt(0)), "all of that attempt is over"
    fences.expire(61.0 + UNDER_WAY_S)
    assert not fences.stopped(attempt(1))
    assert (len(fences), fences._stopped, fences._partly, fences._num_left) == (0, {}, {}, {})


def test_what_aborts_of_one_router_may_leave_is_bounded(fences: Fences, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEFT", 10)
    for i in range(100):
        assert fences.admit(attempt(0, f"known {i}"), 0.0, 60.0)
        assert fences.fence(attempt(0, f"known {i}"), 0.0)
    assert all(fences.fence(attempt(0, f"unknown {i}"), 0.0, 60.0) for i in range(8))
    assert fences.stop_samples(attempt(0, "known 5"), (1, 2), 0.0)
    assert fences.stop_samples(attempt(0, "known 5"), (1, 2), 0.0)
    assert not fences.fence(attempt(0, "unknown 8"), 0.0, 60.0)
    assert not fences.stop_samples(attempt(1, "known 6"), (1,), 0.0)
    assert fences.fence(attempt(0, "known 7"), 0.0, 60.0)
    assert fences.fence(attempt(0, "unknown 8", epoch=8), 0.0, 60.0), "another router pays for it"
    assert len(fences) == 109
    fences.expire(61.0 + UNDER_WAY_S)
    assert not fences._num_left
    assert fences.fence(attempt(0, "unknown 8"), 200.0, 60.0)


def test_a_tombstone_is_small_whatever_its_request_is_called(fences: Fences) -> None:
    num = 20_000
    tracemalloc.start()
    for i in range(num):
        fences.admit(attempt(0, f"{i}" * 40), i / 1000, 60.0)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken / num < 180


def test_stopped_samples_and_tombstones_do_not_slow_each_other_down(fences: Fences) -> None:
    """To forget one looks at no other: counted, not timed."""
    for i in range(2000):
        fences.stop_samples(attempt(0, str(i)), (0,), float(i), 60.0)

    class Untouched(dict):
        def __iter__(self):
            raise AssertionError("all stopped samples are looked at")

    fences._stopped = Untouched(fences._stopped)
    fences.expire(1000.0 + 60.0 + UNDER_WAY_S)
    assert len(fences) == len(fences._partly) == 999


def test_what_is_kept_again_is_kept_longer_and_never_shorter() -> None:
    entries = ExpiringDict[str, int]()
    entries.keep("a", 1, 10.0)
    entries.keep("a", 2, 5.0)
    entries.keep("b", 3, 5.5)
    assert (entries.get("a"), entries.expire(6.0), entries.get("b")) == (2, ["b"], None)
    entries.keep("a", 4, 20.0)
    assert entries.expire(10.0) == []
    assert (entries.get("a"), "a" in entries) == (4, True)
    assert entries.expire(20.0) == ["a"]
    assert (len(entries), entries._by_second, entries._seconds, entries._longer) == (0, {}, [], {})


def test_nothing_is_forgotten_before_its_time() -> None:
    entries = ExpiringDict[str, int]()
    entries.keep("a", 1, 10.5)
    assert entries.expire(10.4) == []
    assert entries.expire(11.0) == ["a"]


def test_an_attempt_that_moves_is_new_again_until_it_is_over(fences: Fences) -> None:
    assert fences.admit(attempt(0), 100.0, 5.0)
    assert fences.admit(attempt(0), 100.0, 5.0, move=1)
    assert not fences.admit(attempt(0), 100.0, 5.0, move=1), "a repeat"
    assert fences.last(attempt(0)) == attempt(0)
    fences.fence(attempt(0), 100.0)
    assert not fences.admit(attempt(0), 100.0, 5.0, move=2)
    assert fences.admit(attempt(1), 100.0, 5.0)
