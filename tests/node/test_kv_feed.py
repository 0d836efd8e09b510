"""What a session sends of the prefix cache: whatever is dropped meanwhile, the router knows at last what is held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.kv_events.feed import KvFeed
from router.placement.prefix_index import PrefixIndex

BLOCKS = [bytes([number]) * 32 for number in range(24)]
changes = st.dictionaries(st.sampled_from(BLOCKS), st.booleans(), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(changes | st.integers(0, 3) | st.just("snapshot"), max_size=40))
def test_the_router_ends_up_with_what_the_node_holds(steps):
    """A step: blocks that come and go, a number of messages that the router takes, or a snapshot without need."""
    feed, index = KvFeed(max_events=4, max_backlog=10), PrefixIndex()
    index.add("n", len(BLOCKS))
    held: set[bytes] = set()

    def take() -> None:
        events = feed.take()
        assert len(events.stored) + len(events.removed) <= 4
        index.apply("n", events)

    for step in steps:
        if isinstance(step, int):
            for _ in range(step):
                if not feed.is_empty:
                    take()
        elif step == "snapshot":
            feed.snapshot(list(held))
        else:
            held = {one for one in held if step.get(one, True)} | {one for one, is_held in step.items() if is_held}
            feed.changed(step)
            assert len(feed._stored) + len(feed._removed) <= len(BLOCKS) + 10
    if feed.lacks_snapshot or not feed._follows:
        feed.snapshot(list(held))
    while not feed.is_empty:
        take()
    assert index.num_blocks("n") == len(held)
    assert all(index.held([one]) == {"n": 1} for one in held)


def test_changes_before_the_first_snapshot_are_in_it():
    feed = KvFeed()
    feed.changed({BLOCKS[0]: True})
    assert feed.is_empty
    feed.snapshot([])
    assert feed.take().snapshot, "a router is told of an empty prefix cache too"
    assert feed.is_empty


def test_of_each_block_only_the_last_change_is_sent():
    feed = KvFeed()
    feed.snapshot([BLOCKS[0]])
    feed.take()
    feed.changed({BLOCKS[1]: True, BLOCKS[0]: False})
    feed.changed({BLOCKS[1]: False, BLOCKS[0]: True})
    events = feed.take()
    assert (events.sequence, events.stored, events.removed) == (1, (BLOCKS[0],), (BLOCKS[1],))
    assert feed.is_empty


def test_losses_are_sent_before_gains_so_that_no_node_seems_to_hold_more_than_it_has():
    feed = KvFeed(max_events=2)
    feed.snapshot([])
    feed.take()
    feed.changed({BLOCKS[0]: True, BLOCKS[1]: False, BLOCKS[2]: True, BLOCKS[3]: False})
    assert set(feed.take().removed) == {BLOCKS[1], BLOCKS[3]}
    assert set(feed.take().stored) == {BLOCKS[0], BLOCKS[2]}


@pytest.mark.parametrize("num_snapshot", [0, 3])
def test_a_backlog_is_dropped_once_it_is_longer_than_a_snapshot_and_its_room(num_snapshot):
    feed = KvFeed(max_backlog=10)
    feed.snapshot(BLOCKS[:num_snapshot])
    feed.changed(dict.fromkeys(BLOCKS[num_snapshot : num_snapshot + 10], True))
    assert not feed.lacks_snapshot
    feed.changed({BLOCKS[num_snapshot + 10]: True})
    assert feed.lacks_snapshot
    assert feed.is_empty
    feed.changed({BLOCKS[0]: True})
    assert feed.is_empty, "nothing makes sense before the next snapshot"
