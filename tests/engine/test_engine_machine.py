"""Engine and scheduler under random arrivals, aborts, leases, handoffs and moves, in pools small enough to evict and
preempt.

The model is a fake whose KV can be read back, so a wrong block table is a failed assertion in it; and each sample's
tokens are compared, one by one, with those of an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.layout import num_blocks_for
from baton.messages import AttemptId
from baton.sampling import FinishReason, SamplingParams
from decode_node.migration import is_movable
from engine.block_manager import NULL_BLOCK
from engine.config import EngineConfig
from engine.engine import Engine
from engine.holdings import Holding
from engine.scheduler import Plan
from engine.sequence import Sequence, SequenceState
from engine.step import SampledToken, StepResult
from engine.step_padding import StepPadding
from tests.engine.fake_tier import NOBODY, FakeTier
from tests.machines import machine
from tests.protocol.fake_model import EOS, VOCAB_SIZE, FakeModel, expected_output, next_token

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40


@dataclass
class Request:
    """What one request should give, and what it gave."""

    expected: dict[int, tuple[list[int], FinishReason]]
    got: dict[int, list[int]]
    sequences: list[Sequence]
    finished: dict[int, FinishReason] = field(default_factory=dict)
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return self.aborted or len(self.finished) == len(self.expected)


class Forcing:
    """A matcher that leaves no alternative, now and then, to what the model says anyway."""

    ready, error, finished = True, None, False

    def __init__(self, seq: Sequence, draw: random.Random, tokens: Iterable[int]) -> None:
        self.seq, self.random, self.tokens = seq, draw, list(tokens)

    def accept(self, token: int) -> None:
        self.tokens.append(token)

    def forced(self) -> list[int]:
        tokens = [*self.seq.prompt_tokens, *self.tokens]
        for _ in range(self.random.choice([0, 0, 1, 2, 6])):
            tokens.append(next_token(tokens, self.seq.sampling.seed))
        return tokens[len(self.seq.prompt_tokens) + len(self.tokens) :]

    def fork(self, tokens: Iterable[int] = ()) -> Forcing:
        return Forcing(self.seq, self.random, [*self.tokens, *tokens])

    def fill(self, mask: object) -> None:
        raise AssertionError("the model asks nobody")


@dataclass
class Lease:
    """A handoff within one pool: the blocks that its second half will run in."""

    source: Sequence
    table: list[int]
    spares: list[int]
    samples: list[int]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_more_blocks=st.integers(0, 5),  # than one sequence may need
        budget=st.sampled_from([64, 16, 7, 3, 1]),
        max_num_seqs=st.sampled_from([8, 4, 2]),
        stages=st.sampled_from([0, 0, 1, 1, 3]),
        num_speculative_tokens=st.sampled_from([0, 2, 5]),
        target_itl_s=st.sampled_from([None, 1e-9]),
        windows=st.sampled_from([(None, None), (None, None), (None, 6), (7, 7), (None, 1), (9, 3)]),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        num_more_blocks: int,
        budget: int,
        max_num_seqs: int,
        stages: int,
        num_speculative_tokens: int,
        target_itl_s: float | None,
        windows: tuple[int | None, ...],
        seed: int,
    ) -> None:
        config = EngineConfig(
            num_blocks=100,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            async_scheduling=stages > 0,
            num_stages=max(1, stages),
            num_speculative_tokens=num_speculative_tokens,
            target_itl_s=target_itl_s,  # so short that every chunk is the least one
            padding=StepPadding(((2, (2, 5)), (8, (3, 6)))),
            windows=tuple(dict.fromkeys(windows)),  # layers that differ are in different groups
        )
        num_blocks = 1 + config.most_blocks(MAX_MODEL_LEN) + num_more_blocks
        self.config = config = dataclasses.replace(config, num_blocks=num_blocks)
        self.model = FakeModel(num_blocks, BLOCK_SIZE, windows=windows)
        assert self.model.layout.windows == config.windows
        self.model.most_unknown = max(1, config.num_steps_ahead)
        self.tier = FakeTier(self.model)
        self.random = random.Random(seed)
        if num_speculative_tokens:
            self.model.chooses_nothing = lambda: self.random.random() < 0.1
        self.engine = self.tier.engine = Engine(config, self.model, tier=self.tier)
        self.model.blocks = self.engine.blocks
        self.requests: dict[AttemptId, Request] = {}
        self.queue: list[AttemptId] = []  # as they arrived, until started
        self.leases: list[Lease] = []
        self.moving: list[Sequence] = []  # stopped, to go on elsewhere or here
        self.num_scored: dict[Sequence, int] = {}  # prompt tokens whose logprobs have come
        self.may_sleep = False  # nothing has happened since the engine asked for no further turn
        self.held: list[list[int]] = []  # blocks promised to nothing in particular
        self.now = 0.0

    # ---- what can happen ----

    @rule(
        prefix=st.sampled_from([(5, 6, 7, 8, 9, 10, 11, 12), (5, 6, 7, 8, 1, 1)]),
        suffix=st.lists(st.integers(2, 3), max_size=6),
        num_samples=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 30),
        seed=st.integers(0, 3),
        hand_off=st.sampled_from([False, False, True]),
        num_given=st.integers(0, 3),
        salt=st.sampled_from(["", "", "salt"]),
        scored=st.sampled_from([None, None, 0]),
        forced=st.sampled_from([False, False, True]),
    )
    def arrive(
        self,
        prefix: tuple[int, ...],
        suffix: list[int],
        num_samples: int,
        max_tokens: int,
        seed: int,
        hand_off: bool,
        num_given: int,
        salt: str,
        scored: int | None,
        forced: bool,
    ) -> None:
        if sum(not request.ended for request in self.requests.values()) >= 8:
            return
        prompt = (*prefix, *suffix)
        sampling = SamplingParams(seed=seed, max_tokens=max_tokens)
        samples = list(range(num_samples))
        expected = {s: expected_output(prompt, sampling, s, MAX_MODEL_LEN) for s in samples}
        given = expected[0][0][: min(num_given, len(expected[0][0]) - 1)] if num_samples == 1 else []
        self.now += 1
        attempt_id = AttemptId(1, str(len(self.requests)), 0)
        runs_ahead = not self.config.num_speculative_tokens or self.random.random() < 0.3
        seq = Sequence(
            attempt_id, samples, prompt, sampling, [*prompt, *given], hand_off, salt, self.now, runs_ahead=runs_ahead
        )
        seq.num_prompt_logprobs = scored
        if forced and num_samples == 1:
            seq.matcher, seq.runs_ahead = Forcing(seq, self.random, given), False
        self.engine.add(seq)
        self.requests[attempt_id] = Request(expected, {s: list(given) for s in samples}, [seq])
        self.queue.append(attempt_id)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        self.may_sleep = False
        for _ in range(times):
            self.now += 1
            before = [seq for seq in self.live(SequenceState.WAITING) if seq.num_preemptions]
            # What is before the block that is being loaded for it may have been evicted since: it still waits.
            before = [seq for seq in before if not self.awaits_load(seq) and seq not in self.engine.waiting._deferred]
            plan, result = self.compute()
            self.take(plan, result)
            self.whole()
            if plan.started:  # one that is due earlier may have waited for a load meanwhile
                latest = max(seq.due_s for seq in plan.started)
                passed = [seq for seq in before if seq.state is SequenceState.WAITING and seq.due_s <= latest]
                assert not passed, "newcomers went first"

    @precondition(lambda self: any(not request.ended for request in self.requests.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        attempts = [attempt_id for attempt_id, request in self.requests.items() if not request.ended]
        attempt_id = data.draw(st.sampled_from(attempts))
        request = self.requests[attempt_id]
        request.aborted = True
        for lease in [lease for lease in self.leases if lease.source.attempt_id == attempt_id]:
            self.drop(lease)
        for seq in request.sequences * 2:  # once more changes nothing
            self.engine.sequences.release(seq)
        self.moving = [seq for seq in self.moving if seq not in request.sequences]
        self.queue = [waiting for waiting in self.queue if waiting != attempt_id]

    @rule(n=st.integers(1, 4))
    def hold(self, n: int) -> None:
        if len(self.held) < 2 and self.engine.blocks.can_allocate(n):
            self.held.append(self.engine.allocate(n))

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        self.engine.blocks.release(self.held.pop())

    @precondition(lambda self: self.live(SequenceState.WAITING))
    @rule(data=st.data(), squeeze=st.booleans())
    def begin_load(self, data: st.DataObject, squeeze: bool) -> None:
        """What a waiting sequence lacks, from the tier, which has taken all that was evicted."""
        if squeeze:
            self.engine.blocks.release(self.engine.allocate(max(0, self.engine.blocks.num_unclaimed)))
        if load := self.tier.begin(data.draw(st.sampled_from(self.live(SequenceState.WAITING)))):
            event(f"{len(load.blocks)} blocks to load")

    @precondition(lambda self: self.tier.loads)
    @rule(data=st.data(), end=st.sampled_from(["finish", "finish", "fail", "let go"]))
    def end_load(self, data: st.DataObject, end: str) -> None:
        load = data.draw(st.sampled_from(self.tier.loads))
        if end == "let go" and load.owned:
            self.tier.let_go(load)
        elif end == "fail":
            self.tier.fail(load)
        else:
            self.tier.finish(load)

    @precondition(lambda self: self.parked())
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """As a decode node grants: blocks and places for all forks, the prefix from its own cache."""
        seq = data.draw(st.sampled_from(self.parked()))
        request = self.requests[seq.attempt_id]
        samples = [s for s in seq.samples if s not in request.finished]
        num_full = seq.num_tokens // BLOCK_SIZE
        blocks, shape = self.engine.blocks, self.config.table_shape
        held = self.engine.tables.match_from(seq.block_hashes(num_full, BLOCK_SIZE), seq.num_tokens)
        hits = [block for of_group in held for block in of_group]
        table = [NULL_BLOCK] * (num_full + 1) * shape.width
        for group, found in enumerate(held):
            for column, block in enumerate(found, shape.first_column(group, seq.num_tokens)):
                table[column * shape.width + group] = block
        ends = [shape.first_column(group, seq.num_tokens) + len(found) for group, found in enumerate(held)]
        lacking = shape.lacking(num_full + 1, seq.num_tokens, ends)
        num_spares = (len(samples) - 1) * shape.width
        places = self.config.max_num_seqs - self.engine.num_running - self.engine.scheduler.num_reserved_seqs
        fits = blocks.can_allocate(len(lacking) + num_spares, keep=hits)
        if not samples or len(samples) > places or not fits:
            return
        blocks.acquire(hits)
        fresh = self.engine.allocate(len(lacking) + num_spares)
        for entry, block in zip(lacking, fresh, strict=False):
            table[entry] = block
        self.engine.scheduler.reserve_seqs(len(samples))
        self.leases.append(Lease(seq, table, fresh[len(lacking) :], samples))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        source, request = lease.source, self.requests[lease.source.attempt_id]
        num_moved = num_blocks_for(source.num_tokens, BLOCK_SIZE) * self.config.table_shape.width
        for block, copy in zip(source.block_table[:num_moved], lease.table, strict=False):
            assert (block == NULL_BLOCK) == (copy == NULL_BLOCK)
            if copy != NULL_BLOCK and self.engine.blocks.hash_of(copy) is None:
                self.model.copy_blocks([(block, copy)])
        self.engine.sequences.release(source)
        target = Sequence(
            source.attempt_id, lease.samples, source.prompt_tokens, source.sampling, arrived_s=source.arrived_s
        )
        target.cache_salt, target.block_table, target.runs_ahead = source.cache_salt, lease.table, source.runs_ahead
        outputs = {s: tuple(request.got[s]) for s in lease.samples}
        self.engine.scheduler.unreserve_seqs(len(lease.samples))
        event(f"adopted {len(outputs)}")
        children = self.engine.adopt(target, outputs, lease.spares)
        assert [child.samples for child in children] == [[s] for s in lease.samples]
        assert all(child.num_computed_tokens == child.num_tokens - 1 for child in children)
        request.sequences += [target, *children]

    @precondition(lambda self: self.leases)
    @rule()
    def expire(self) -> None:
        lease = self.leases[0]
        self.drop(lease)
        self.requests[lease.source.attempt_id].aborted = True
        self.engine.sequences.release(lease.source)

    @precondition(lambda self: self.movable())
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.movable()))
        self.engine.sequences.stop(seq)
        self.moving.append(seq)

    @precondition(lambda self: self.moving)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.moving))
        self.moving.remove(seq)
        event(f"resumed {seq.state.value}")
        self.engine.sequences.resume(seq)

    def move(self, seq: Sequence) -> None:
        """The parked sequence goes on with copies of its blocks, as on another node, if there is room for them."""
        if (table := self.copied(seq)) is not None:
            self.moving.remove(seq)
            event("moved")
            self.engine.sequences.release(seq)
            names = seq.attempt_id, seq.samples, seq.prompt_tokens, seq.sampling
            target = Sequence(*names, cache_salt=seq.cache_salt, arrived_s=seq.arrived_s, runs_ahead=seq.runs_ahead)
            target.block_table = table
            if seq.matcher is not None:
                target.matcher = Forcing(target, self.random, ())
            children = self.engine.adopt(target, {seq.samples[0]: seq.output_tokens}, [])
            self.requests[seq.attempt_id].sequences += [target, *children]

    def movable(self) -> list[Sequence]:
        """Those of which several tokens have no KV yet come first: they are rare."""
        found = [seq for seq in self.live(SequenceState.RUNNING) if is_movable(seq) and not seq.stops]
        return [seq for seq in found if seq.num_tokens - seq.num_computed_tokens > 1] or found

    def copied(self, seq: Sequence) -> list[int] | None:
        """A table with all that the parked sequence's next token reads; None: there are too few blocks."""
        blocks, tables, num_computed = self.engine.blocks, self.engine.tables, seq.num_tokens - 1
        num_full = num_computed // BLOCK_SIZE
        found = tables.match_from(seq.block_hashes(num_full, BLOCK_SIZE), num_computed)
        hits = [block for of_group in found for block in of_group]
        lacking = tables.shape.lacking(num_full + 1, num_computed, tables.ends_of(found, num_computed))
        if not blocks.can_allocate(len(lacking), keep=hits):
            return None
        blocks.acquire(hits)
        fresh = self.engine.allocate(len(lacking))
        table = tables.table_of(found, num_computed, lacking, fresh)
        pairs = [(block, copy) for block, copy in zip(seq.block_table, table, strict=False) if copy in fresh]
        self.model.copy_blocks(pairs)
        return table

    # ---- what must hold ----

    def guess(self) -> None:
        """As a drafter does that is right every other time."""
        for seq in self.live(SequenceState.RUNNING):
            if seq.takes_drafts and self.random.random() < 0.7:
                output = self.requests[seq.attempt_id].expected[seq.samples[0]][0][seq.num_output_tokens :]
                guess = [token if self.random.random() < 0.7 else token + 1 for token in output]
                self.engine.propose(seq, guess + [3] * self.random.randrange(3))  # also beyond its end

    def compute(self) -> tuple[Plan, StepResult]:
        self.guess()
        self.awaited = {seq for seq in self.live(SequenceState.WAITING) if self.awaits_load(seq)}
        plan = self.engine.schedule(self.now)
        assert len(plan.chunks) <= self.config.max_num_seqs
        prompts = [chunk for chunk in plan.chunks if chunk.length > max(1, chunk.num_logits)]
        assert sum(chunk.length for chunk in prompts) <= self.config.max_num_batched_tokens
        assert not (self.may_sleep and plan.chunks), "it did not ask for this turn"
        for seq in plan.preempted:
            if seq in self.moving:
                self.moving.remove(seq)
                self.engine.sequences.resume(seq)
        result = self.engine.compute(plan)
        self.may_sleep = not result.again
        return plan, result

    def take(self, plan: Plan, result: StepResult) -> None:
        for seq in plan.started:
            passed = self.queue[: self.queue.index(seq.attempt_id)]
            firsts = {self.requests[attempt_id].sequences[0] for attempt_id in passed}
            assert firsts <= self.awaited | self.engine.waiting._deferred.keys(), "not in order of arrival"
            self.queue.remove(seq.attempt_id)
            assert seq not in self.awaited or plan.evicted  # what is before the loading block may be gone since
            event(f"past others {bool(passed)}")
            assert seq.num_cached_tokens % BLOCK_SIZE == 0
            assert seq.num_cached_tokens < seq.num_tokens
            event(f"prefix hit {bool(seq.num_cached_tokens)}")
        if plan.preempted:
            event("preempted")
            assert all(not seq.hand_off for seq in plan.preempted)
            stayed = [seq.arrived_s for seq in self.live(SequenceState.RUNNING) if not seq.hand_off]
            assert max(stayed, default=0) <= min(seq.arrived_s for seq in plan.preempted), "not the youngest"
        for seq, piece in result.prompt_logprobs:
            assert piece.first_index == self.num_scored.setdefault(seq, 1), "a gap or a repeat"
            self.num_scored[seq] += piece.num_tokens
        for token in result.sampled:
            self.hear(token)
        self.park_settled()
        for seq in {token.sequence for token in result.sampled if token.sequence.hand_off}:
            assert seq.state is SequenceState.PARKED
            assert seq.num_computed_tokens == seq.num_tokens
            width = self.config.table_shape.width
            assert len(seq.block_table) == num_blocks_for(seq.num_tokens, BLOCK_SIZE) * width
            if self.requests[seq.attempt_id].ended:  # all of it ended with its first token
                self.engine.sequences.release(seq)
                self.may_sleep = False

    def park_settled(self) -> None:
        """Now or later; those that are parked already may move."""
        self.moving = [seq for seq in self.moving if seq.state is not SequenceState.FINISHED]
        for seq in list(self.moving):
            if self.random.random() < 0.4:
                continue
            self.may_sleep = False
            if self.engine.sequences.is_settled(seq):
                self.engine.sequences.park(seq)
            elif seq.state is SequenceState.PARKED:
                self.move(seq)

    def hear(self, token: SampledToken) -> None:
        request = self.requests[token.sequence.attempt_id]
        assert not request.aborted
        assert token.sample not in request.finished
        if token.sequence not in request.sequences:
            request.sequences.append(token.sequence)
        first = request.sequences[0]
        assert first.num_prompt_logprobs is None or self.num_scored.get(first, 1) == len(first.prompt_tokens)
        output, reason = request.expected[token.sample]
        got = request.got[token.sample]
        assert token.index == len(got), "a gap or a repeat"
        got.append(token.token)
        assert got == output[: len(got)]
        assert token.finish == (reason if len(got) == len(output) else None)
        if token.finish:
            request.finished[token.sample] = token.finish
            event(f"finished after {token.sequence.num_preemptions} preemptions")
            event(f"finished {'ahead' if token.sequence.runs_ahead else 'with guesses'}")
            if not token.sequence.hand_off:
                assert token.sequence.state is SequenceState.FINISHED
                assert not token.sequence.block_table

    def awaits_load(self, seq: Sequence) -> bool:
        """Whether the first block that it lacks is on its way, unless it computes all of its prompt for the
        logprobs."""
        if seq.lacks_prompt_logprobs:
            return False
        hashes = seq.block_hashes((seq.num_tokens - 1) // BLOCK_SIZE, BLOCK_SIZE)
        blocks = self.engine.blocks
        if self.config.table_shape.has_windows:
            return self.engine.tables.match(hashes)[1] is not None
        return any(map(blocks.is_loading, hashes[len(blocks.match(hashes)) :][:1]))

    def live(self, state: SequenceState) -> list[Sequence]:
        known = [seq for request in self.requests.values() for seq in request.sequences]
        return [seq for seq in known if seq.state is state]

    def parked(self) -> list[Sequence]:
        leased = [lease.source for lease in self.leases]
        return [seq for seq in self.live(SequenceState.PARKED) if seq not in leased and seq.hand_off]

    def drop(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.engine.scheduler.unreserve_seqs(len(lease.samples))
        self.engine.blocks.release(lease.table)
        self.engine.blocks.release(lease.spares)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "engine"):
            leases = [blocks for lease in self.leases for blocks in (lease.table, lease.spares)]
            held = [Holding("lease", "", NOBODY, (), 0.0, blocks) for blocks in leases + self.held]
            self.engine.check_integrity(held + self.tier.holdings())
            assert self.engine.num_running + self.engine.scheduler.num_reserved_seqs <= self.config.max_num_seqs

    def teardown(self) -> None:
        """With all leases gone and nobody new, everything left runs to its end."""
        if not hasattr(self, "engine"):
            return
        for seq in self.moving:
            self.engine.sequences.resume(seq)
        self.moving = []
        while self.held:
            self.let_go()
        while self.leases:
            self.expire()
        while self.tier.loads:
            self.tier.finish(self.tier.loads[0])
        for _ in range(2000):
            self.may_sleep = False
            plan, result = self.compute()
            self.take(plan, result)
            for seq in self.parked():
                self.requests[seq.attempt_id].aborted = True
                self.engine.sequences.release(seq)
            if not self.engine.has_work and not result.again:
                break
        assert all(request.ended for request in self.requests.values()), "somebody starved"
        self.engine.check_integrity()
        blocks = self.engine.blocks
        assert blocks.num_free + blocks.num_cached == blocks.num_total


class EveryEngineMachine(EngineMachine):
    """All runs."""


TestEngine = EngineMachine.TestCase
TestEngine.settings = machine(max_examples=60, steps=50)
TestEveryEngine = pytest.mark.full(pytest.mark.timeout(600)(EveryEngineMachine.TestCase))
TestEveryEngine.settings = machine(max_examples=300, steps=50)
