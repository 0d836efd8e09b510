"""An engine under hypothesis, with what must hold of it whatever happens: `test_engine_machine.py` makes things happen.

The model is a fake whose KV can be read back, so a wrong block table is a failed assertion in it; and each sample's
tokens are compared, one by one, with those of an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from baton.layout import num_blocks_for
from baton.messages import AttemptId
from baton.sampling import FinishReason
from engine.config import EngineConfig
from engine.engine import Engine
from engine.holdings import Holding
from engine.scheduler import Plan
from engine.sequence import Sequence, SequenceState
from engine.step import SampledToken, StepResult
from engine.step_padding import StepPadding
from tests.engine.fake_tier import NOBODY, FakeTier
from tests.protocol.fake_model import EOS, VOCAB_SIZE, FakeModel

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


@dataclass
class Lease:
    """A handoff within one pool: the blocks that its second half will run in."""

    source: Sequence
    table: list[int]
    spares: list[int]
    samples: list[int]


class EngineWatch(RuleBasedStateMachine):
    """The engine, what it was asked for, and the checks of each step."""

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
        self.leases: list[Lease] = []  # of `EngineHandoffs`, as is what moves
        self.moving: list[Sequence] = []  # stopped, to go on elsewhere or here
        self.num_scored: dict[Sequence, int] = {}  # prompt tokens whose logprobs have come
        self.may_sleep = False  # nothing has happened since the engine asked for no further turn
        self.held: list[list[int]] = []  # blocks promised to nothing in particular
        self.now = 0.0

    def live(self, state: SequenceState) -> list[Sequence]:
        known = [seq for request in self.requests.values() for seq in request.sequences]
        return [seq for seq in known if seq.state is state]

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
        for seq in {token.sequence for token in result.sampled if token.sequence.hand_off}:
            assert seq.state is SequenceState.PARKED
            assert seq.num_computed_tokens == seq.num_tokens
            width = self.config.table_shape.width
            assert len(seq.block_table) == num_blocks_for(seq.num_tokens, BLOCK_SIZE) * width
            if self.requests[seq.attempt_id].ended:  # all of it ended with its first token
                self.engine.sequences.release(seq)
                self.may_sleep = False

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

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "engine"):
            leases = [blocks for lease in self.leases for blocks in (lease.table, lease.spares)]
            held = [Holding("lease", "", NOBODY, (), 0.0, blocks) for blocks in leases + self.held]
            self.engine.check_integrity(held + self.tier.holdings())
            assert self.engine.num_running + self.engine.scheduler.num_reserved_seqs <= self.config.max_num_seqs
