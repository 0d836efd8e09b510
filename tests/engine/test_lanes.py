"""Sequences that may have to wait for somebody else with their blocks held, and those beside them."""

from __future__ import annotations

import random

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.waiting_sequences import KNOWN_S

BLOCK_SIZE = 4
NUM_BLOCKS = 20


def sequence(name: str, lane: str | None, num_blocks: int = 4, arrived_s: float = 0.0) -> Sequence:
    """Of as many blocks, none of which another sequence has."""
    draw = random.Random(name)
    prompt = tuple(draw.randrange(1000) for _ in range(num_blocks * BLOCK_SIZE))
    sampling = SamplingParams(max_tokens=4)
    return Sequence(AttemptId(7, name, 0), [0], prompt, sampling, hand_off=True, arrived_s=arrived_s, lane=lane)


class Pool:
    """A scheduler whose sequences are computed at once, and keep their blocks until they `end`."""

    def __init__(self) -> None:
        config = EngineConfig(
            num_blocks=NUM_BLOCKS + 1,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            vocab_size=1000,
            eos_token_ids=(),
            block_size=BLOCK_SIZE,
            max_num_seqs=100,
            max_num_batched_tokens=1000,
        )
        self.blocks = BlockManager(NUM_BLOCKS + 1)
        self.scheduler = Scheduler(config, self.blocks, BlockTables(config, self.blocks))

    def add(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.scheduler.waiting.add(seq)

    def admitted(self) -> list[str]:
        """Who gets blocks now."""
        plan = self.scheduler.schedule()
        for chunk in plan.chunks:
            chunk.sequence.num_computed_tokens = chunk.end
            self.scheduler.remove(chunk.sequence)  # parked
        return [seq.attempt_id.request_id for seq in plan.started]

    def end(self, seq: Sequence) -> None:
        self.scheduler.waiting.leave_lane(seq)
        self.blocks.release(seq.block_table)
        seq.block_table = []


def test_a_lane_that_is_full_for_ever_leaves_the_others_their_share() -> None:
    pool = Pool()
    pool.add(*(sequence(f"full {i}", "full") for i in range(50)), sequence("free 0", "free"))
    assert pool.admitted() == ["full 0", "full 1", "free 0"]
    for i in range(1, 20):
        pool.add(seq := sequence(f"free {i}", "free"))
        assert pool.admitted() == [f"free {i}"]
        pool.end(seq)
    assert len(pool.scheduler.waiting) == 48


def test_one_lane_alone_has_the_whole_pool() -> None:
    pool = Pool()
    pool.add(*(sequence(str(i), "only") for i in range(9)))
    assert pool.admitted() == ["0", "1", "2", "3", "4"]
    pool.scheduler.check_integrity()


def test_one_lane_alone_is_limited_by_nothing_but_free_blocks() -> None:
    """Prompts that share most of theirs have more in all than the pool."""
    pool, first = Pool(), sequence("first", "only", num_blocks=12)
    pool.add(first)
    assert pool.admitted() == ["first"]
    hashes = first.block_hashes(12, BLOCK_SIZE)
    pool.blocks.seal(first.block_table, hashes)
    for name in ("second", "third"):
        pool.add(Sequence(AttemptId(7, name, 0), [0], first.prompt_tokens, first.sampling, hand_off=True, lane="only"))
    assert pool.admitted() == ["second", "third"]


def test_what_has_left_its_lane_counts_no_more() -> None:
    pool = Pool()
    sequences = [sequence(f"a{i}", "a") for i in range(5)]
    pool.add(*sequences, sequence("b", "b", num_blocks=1))
    assert pool.admitted() == ["a0", "a1", "b"]
    assert pool.admitted() == []
    pool.scheduler.waiting.leave_lane(sequences[0])
    pool.scheduler.waiting.leave_lane(sequences[0])
    assert pool.admitted() == ["a2"]


def test_a_lane_always_has_one_however_long_it_is() -> None:
    pool = Pool()
    pool.add(sequence("long", "a", num_blocks=15), sequence("next", "a", num_blocks=1), sequence("b", "b"))
    assert pool.admitted() == ["long", "b"]


def test_one_that_finds_too_few_blocks_keeps_all_behind_it_waiting() -> None:
    """Else short ones of another lane would take them for ever."""
    pool = Pool()
    pool.add(first := sequence("first", None, num_blocks=15))
    assert pool.admitted() == ["first"]
    pool.add(long := sequence("long", "a", num_blocks=10), sequence("short", "b", num_blocks=1))
    assert not pool.scheduler.waiting.lacks_blocks(long.due_s)
    assert pool.admitted() == []
    assert pool.scheduler.waiting.lacks_blocks(long.due_s)
    assert not pool.scheduler.waiting.lacks_blocks(long.due_s - 0.1)
    pool.end(first)
    assert pool.admitted() == ["long", "short"]


def test_who_waits_for_nobody_is_in_no_lane() -> None:
    pool = Pool()
    pool.add(sequence("b", "b", num_blocks=1), *(sequence(str(i), None) for i in range(9)))
    assert pool.admitted() == ["b", "0", "1", "2", "3"]


def test_a_lane_that_nobody_has_come_to_for_long_has_no_share_any_more() -> None:
    pool = Pool()
    pool.add(old := sequence("old", "gone"))
    assert pool.admitted() == ["old"]
    pool.end(old)
    pool.add(*(sequence(f"early {i}", "a", arrived_s=KNOWN_S - 1) for i in range(4)))
    assert pool.admitted() == ["early 0", "early 1"]
    pool.add(sequence("late", "a", arrived_s=KNOWN_S + 1))
    assert pool.admitted() == ["early 2", "early 3", "late"]


def test_who_waits_for_nobody_takes_no_lane_s_share_and_has_none() -> None:
    pool = Pool()
    names = (("none", None, 2), ("a 0", "a", 8), ("a 1", "a", 8))
    pool.add(*(sequence(name, lane, num_blocks) for name, lane, num_blocks in names))
    assert pool.admitted() == ["none", "a 0", "a 1"], "one lane alone has the whole pool"
    pool = Pool()
    pool.add(*(sequence(name, name, num_blocks=1) for name in ("a", "b")), sequence("none", None, num_blocks=10))
    assert pool.admitted() == ["a", "b", "none"]
    pool.add(sequence("more", None, num_blocks=8))
    assert pool.admitted() == ["more"], "together they hold more than a lane may"


def test_a_lane_may_use_up_its_share() -> None:
    pool = Pool()
    pool.add(*(sequence(f"a {i}", "a", num_blocks=5) for i in range(3)), sequence("b", "b"))
    assert pool.admitted() == ["a 0", "a 1", "b"]


def test_a_lane_counts_from_its_last_arrival() -> None:
    """Also if it has been empty since."""
    pool, first_s = Pool(), 2 * KNOWN_S
    pool.add(one := sequence("one", "a", arrived_s=first_s))
    assert pool.admitted() == ["one"]
    pool.end(one)
    pool.add(*(sequence(f"b {i}", "b", num_blocks=9, arrived_s=first_s + 1) for i in range(2)))
    assert pool.admitted() == ["b 0"], "it may come back"


def test_a_lane_is_not_forgotten_while_any_of_it_wait() -> None:
    pool = Pool()
    pool.add(sequence("early", "a"))
    pool.add(sequence("late", "b", arrived_s=KNOWN_S + 1))
    assert pool.admitted() == ["early", "late"]


def test_who_lacks_blocks_does_so_until_it_leaves_or_waits_for_something_else() -> None:
    waiting = Pool().scheduler.waiting
    short, other = sequence("short", None), sequence("other", None)
    for leave in (waiting.remove, lambda seq: waiting.defer(seq, None)):
        waiting.add(short)
        waiting.add(other)
        waiting.note_short(short)
        leave(other)
        assert waiting.lacks_blocks(0.0)
        leave(short)
        assert not waiting.lacks_blocks(0.0)


def test_nothing_is_begun_that_is_due_after_something_of_the_caller_s() -> None:
    waiting = Pool().scheduler.waiting
    seq = sequence("due at 3", None, arrived_s=3.0)
    waiting.add(seq)
    for begins_until_s, first in ((2.9, None), (3.0, seq)):
        waiting.begins_until_s = begins_until_s
        assert waiting.first() is first
    preempted = sequence("preempted", None, arrived_s=3.0)
    waiting.add_preempted(preempted)
    assert waiting.first() is preempted, "of two that are due at a time"
    waiting.begins_until_s = 2.9
    assert waiting.first() is preempted, "it is begun already"


def test_a_preempted_sequence_begins_anew_and_lacks_blocks_until_it_is_gone() -> None:
    waiting, seq = Pool().scheduler.waiting, sequence("preempted", None, arrived_s=3.0)
    seq.num_computed_tokens = 2 * BLOCK_SIZE
    waiting.add_preempted(seq)
    assert (seq.num_computed_tokens, seq.num_preemptions) == (0, 1)
    assert [waiting.lacks_blocks(due_s) for due_s in (2.9, 3.0)] == [False, True]
    waiting.remove(seq)
    assert not waiting.lacks_blocks(3.0)


def test_others_go_ahead_of_one_that_waits_for_something_else() -> None:
    """Of the preempted ones, as of those in its lane."""
    waiting = Pool().scheduler.waiting
    preempted, fresh = ([sequence(f"{kind} {i}", "a") for i in range(2)] for kind in ("preempted", "fresh"))
    for seq in preempted:
        waiting.add_preempted(seq)
    for seq in fresh:
        waiting.add(seq)
    for num_deferred, seq in enumerate((*preempted, *fresh)):
        assert waiting.num_deferred == num_deferred
        assert waiting.first() is seq
        waiting.defer(seq, None)
    assert waiting.first() is None


def test_all_that_are_due_are_counted_whatever_their_lanes() -> None:
    waiting = Pool().scheduler.waiting
    for lane in (None, "a", "b"):
        for arrived_s in (1.0, 2.0):
            waiting.add(sequence(f"{lane} {arrived_s}", lane, arrived_s=arrived_s))
    waiting.add_preempted(sequence("preempted", None, arrived_s=2.0))
    assert [waiting.num_up_to(due_s) for due_s in (0.9, 1.0, 2.0)] == [0, 3, 7]


def test_a_lane_whose_blocks_are_held_for_long_keeps_its_account() -> None:
    pool, held = Pool(), sequence("held", "a")
    pool.add(held)
    assert pool.admitted() == ["held"]
    pool.add(sequence("late", "b", arrived_s=KNOWN_S + 1))
    pool.add(*(sequence(f"more {i}", "a", arrived_s=KNOWN_S + 2) for i in range(2)))
    assert pool.admitted() == ["late", "more 0"], "two of four blocks each are a half"
    pool.end(held)
    assert pool.admitted() == ["more 1"]


def test_whoever_leaves_the_queue_is_not_admitted() -> None:
    pool = Pool()
    gone, stays = sequence("gone", "a"), sequence("stays", "a")
    pool.add(gone, stays, sequence("b", "b"))
    pool.scheduler.remove(gone)
    assert (len(pool.scheduler.waiting), pool.admitted()) == (2, ["stays", "b"])


def test_tokens_that_wait_are_counted() -> None:
    pool = Pool()
    one, two, three = (sequence(name, "d1", num_blocks) for name, num_blocks in (("a", 2), ("b", 3), ("c", NUM_BLOCKS)))
    pool.add(one, two, three)
    assert pool.scheduler.waiting.num_tokens == (2 + 3 + NUM_BLOCKS) * BLOCK_SIZE
    assert pool.admitted() == ["a", "b"]
    assert pool.scheduler.waiting.num_tokens == NUM_BLOCKS * BLOCK_SIZE
    pool.scheduler.remove(three)
    pool.scheduler.remove(three)
    assert pool.scheduler.waiting.num_tokens == 0
