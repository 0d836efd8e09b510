"""Blocks that leave the pool and come back: what is evicted is told in time, and who wants it waits for it alone.

The model reads back the KV that it computes with, so a block that came back with other bytes fails in it.
"""

from __future__ import annotations

import pytest

from baton.block_hash import BlockHash
from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.block_manager import BlockState
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sequence import Sequence, SequenceState
from tests.engine.fake_tier import FakeTier, Load
from tests.protocol.fake_model import EOS, VOCAB_SIZE, FakeModel, expected_output

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
PROMPT = tuple(range(5, 22))
"""Four full blocks and a token."""
OTHER = tuple(range(30, 59))


class Tiered:
    """An engine of ten blocks above a tier, each turn of which ends with a recount."""

    def __init__(self, ahead: bool = False) -> None:
        self.model = FakeModel(11, BLOCK_SIZE)
        self.tier = FakeTier(self.model)
        config = EngineConfig(
            num_blocks=11,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            block_size=BLOCK_SIZE,
            max_num_seqs=4,
            async_scheduling=ahead,
        )
        self.engine = self.tier.engine = Engine(config, self.model, tier=self.tier)
        self.model.blocks = self.engine.blocks
        self.said: dict[Sequence, list[int]] = {}
        self.now = 0.0

    def add(self, prompt: tuple[int, ...], max_tokens: int = 3, samples: int = 1) -> Sequence:
        self.now += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        seq = Sequence(AttemptId(1, f"{self.now}", 0), list(range(samples)), prompt, sampling, arrived_s=self.now)
        self.engine.add(seq)
        return seq

    def step(self) -> None:
        self.now += 1
        result = self.engine.compute(self.engine.schedule(self.now))
        for token in result.sampled:
            self.said.setdefault(token.sequence, []).append(token.token)
        self.check()

    def run(self) -> None:
        for _ in range(50):
            self.step()
        assert not self.engine.has_work

    def check(self) -> None:
        self.engine.check_integrity(self.tier.holdings())

    def evict(self, seq: Sequence) -> list[BlockHash]:
        """Run it, and others until all of its prompt has left the pool; its blocks' hashes."""
        hashes = seq.block_hashes(4, BLOCK_SIZE)
        self.run()
        self.add(OTHER, max_tokens=9)
        self.run()
        assert all(self.engine.blocks.find(block_hash) is None for block_hash in hashes)
        return hashes

    def load(self, seq: Sequence) -> Load:
        load = self.tier.begin(seq)
        assert load is not None
        self.check()
        return load


def expected(seq: Sequence) -> list[int]:
    return expected_output(seq.prompt_tokens, seq.sampling, 0, MAX_MODEL_LEN)[0]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_tier_takes_what_is_evicted_and_brings_it_back(ahead: bool) -> None:
    tiered = Tiered(ahead)
    hashes = tiered.evict(tiered.add(PROMPT))
    again = tiered.add(PROMPT)
    load = tiered.load(again)
    assert load.hashes == hashes
    assert tiered.engine.blocks.counts_by_state()[BlockState.LOADING] == 4
    for _ in range(3):
        tiered.step()
    assert again.state is SequenceState.WAITING
    tiered.tier.finish(load)
    tiered.check()
    tiered.run()
    assert again.num_cached_tokens == 16
    assert tiered.said[again] == expected(again)


@pytest.mark.parametrize("ahead", [False, True])
def test_others_go_past_a_sequence_that_waits_for_a_load(ahead: bool) -> None:
    tiered = Tiered(ahead)
    tiered.evict(tiered.add(PROMPT))
    waits = tiered.add(PROMPT)
    load = tiered.load(waits)
    beside = tiered.add((60, 61, 62), max_tokens=8)
    shares = tiered.add(PROMPT)
    for _ in range(4):
        tiered.step()
    assert tiered.said[beside] == expected(beside)[: len(tiered.said[beside])]
    assert len(tiered.said[beside]) >= 3
    assert {waits.state, shares.state} == {SequenceState.WAITING}
    tiered.tier.finish(load)
    plan = tiered.engine.schedule(99.0)
    assert plan.started == [waits, shares], "in order of arrival, before whoever comes now"
    assert [seq.num_cached_tokens for seq in plan.started] == [16, 16]
    assert waits.block_table[:4] == shares.block_table[:4] == load.blocks
    tiered.engine.compute(plan)
    tiered.check()
    tiered.engine.sequences.release(waits)
    tiered.engine.sequences.release(shares)
    tiered.run()


def test_who_waited_for_a_load_that_fails_computes_its_tokens() -> None:
    tiered = Tiered()
    tiered.evict(tiered.add(PROMPT))
    again = tiered.add(PROMPT)
    load = tiered.load(again)
    tiered.step()
    tiered.tier.fail(load)
    tiered.check()
    tiered.run()
    assert again.num_cached_tokens == 0
    assert tiered.said[again] == expected(again)


def test_half_a_load_is_a_hit_once_the_rest_has_failed() -> None:
    tiered = Tiered()
    tiered.evict(tiered.add(PROMPT))
    again = tiered.add(PROMPT)
    load = tiered.load(again)
    tiered.tier.loads.remove(load)
    halves = [Load(load.blocks[:2], load.hashes[:2]), Load(load.blocks[2:], load.hashes[2:])]
    tiered.tier.loads += halves
    tiered.tier.finish(halves[0])
    tiered.step()
    assert again.state is SequenceState.WAITING, "the rest is still on its way"
    tiered.tier.fail(halves[1])
    tiered.run()
    assert again.num_cached_tokens == 8
    assert tiered.said[again] == expected(again)


@pytest.mark.parametrize("let_go", [False, True])
def test_an_abort_while_a_load_is_waited_for(let_go: bool) -> None:
    """The sequence is gone at once and holds nothing; what was on its way ends as a hit for the next."""
    tiered = Tiered()
    tiered.evict(tiered.add(PROMPT))
    aborted = tiered.add(PROMPT)
    load = tiered.load(aborted)
    tiered.step()
    tiered.engine.sequences.release(aborted)
    tiered.check()
    assert not tiered.engine.has_work
    if let_go:
        tiered.tier.let_go(load)
        tiered.check()
    tiered.step()
    tiered.tier.finish(load)
    tiered.check()
    again = tiered.add(PROMPT)
    tiered.run()
    assert again.num_cached_tokens == 16
    assert tiered.said[again] == expected(again)


def test_a_preempted_sequence_waits_for_a_load_and_newcomers_do_not() -> None:
    tiered = Tiered()
    hashes = tiered.evict(tiered.add(PROMPT))
    old = tiered.add((60, 61, 62), max_tokens=33)
    young = tiered.add(PROMPT, max_tokens=20)
    while not tiered.engine.waiting.has_preempted(float("inf")):
        tiered.step()
    assert young.state is SequenceState.WAITING
    lease = tiered.engine.allocate(tiered.engine.blocks.num_free + tiered.engine.blocks.num_cached)
    assert all(tiered.engine.blocks.find(block_hash) is None for block_hash in hashes)
    tiered.engine.sequences.release(old)
    tiered.engine.blocks.release(lease)
    load = tiered.load(young)
    newcomer = tiered.add((70, 71), max_tokens=2)
    tiered.step()
    assert newcomer.state is SequenceState.RUNNING
    assert young.state is SequenceState.WAITING
    tiered.tier.finish(load)
    tiered.run()
    assert tiered.said[young] == expected(young)


@pytest.mark.parametrize("ahead", [False, True])
def test_forks_and_leases_tell_the_tier_before_they_write(ahead: bool) -> None:
    tiered = Tiered(ahead)
    first = tiered.add(PROMPT, max_tokens=2)
    hashes = first.block_hashes(4, BLOCK_SIZE)
    tiered.run()
    lease = tiered.engine.allocate(tiered.engine.blocks.num_free - 2)
    held = tiered.add((60, 61, 62, 63, 64, 65), max_tokens=3, samples=3)  # two blocks, and two copies of the last
    for _ in range(3):
        tiered.now += 1
        tiered.engine.compute(tiered.engine.schedule(tiered.now))
    assert held.state is SequenceState.FINISHED, "it has forked"
    assert tiered.tier.num_stored == 2
    more = tiered.engine.allocate(2)
    assert tiered.tier.num_stored == 4

    def land() -> None:
        tiered.model.pool_bytes[more] = 77

    tiered.model.enqueue(land)
    for _ in range(10):
        tiered.engine.compute(tiered.engine.schedule(99.0))
    tiered.engine.blocks.release(lease + more)
    again = tiered.add(PROMPT)
    assert tiered.load(again).hashes == hashes
    tiered.tier.finish(tiered.tier.loads[0])
    tiered.run()
    assert tiered.said[again] == expected(again)
