"""An engine under hypothesis, with what must hold of it whatever happens: `test_engine_machine.py` makes things happen.

The model is a fake whose KV can be read back, so a wrong block table is a failed assertion in it; and each sample's
tokens are compared, one by one, with those of an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from baton.audit import KvUse
from baton.layout import num_blocks_for
from baton.messages import AttemptId
from baton.sampling import FinishReason, SamplingParams
from engine.beams import BeamGroup
from engine.config import EngineConfig
from engine.engine import Engine
from engine.holdings import Holding
from engine.scheduler import Plan
from engine.sequence import Sequence, SequenceState
from engine.step import SampledToken, StepResult
from engine.step_padding import UNPADDED, StepPadding
from tests.engine.beam_reference import Found
from tests.engine.fake_tier import NOBODY, FakeTier
from tests.protocol.fake_model import EOS, VOCAB_SIZE, FakeModel

MAX_MODEL_LEN = 40


@dataclass
class Request:
    """What one request should give, and what it gave. `expected`: by sample, without those that were dropped since.
    `beams`: of a search, which has the sequences instead."""

    expected: dict[int, tuple[list[int], FinishReason]]
    got: dict[int, list[int]]
    sequences: list[Sequence]
    expected_beams: Found = field(default_factory=list)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    aborted: bool = False
    beams: BeamGroup[Sequence] | None = None
    found: Found | None = None
    fails: bool = False

    @property
    def ended(self) -> bool:
        if self.beams is not None:
            return self.aborted or self.found is not None
        return self.aborted or self.expected.keys() <= self.finished.keys()


NO_BEAMS = BeamGroup[Sequence](NOBODY, 0, SamplingParams(), ())


@dataclass
class Lease:
    """A handoff within one pool: the blocks that its second half will run in."""

    source: Sequence
    table: list[int]
    spares: list[int]
    samples: list[int]


SETTINGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([4, 4, 4, 4, 1, 3, 16]),
        "max_num_batched_tokens": st.sampled_from([64, 16, 7, 3, 1]),
        "max_num_seqs": st.sampled_from([8, 8, 4, 2, 1]),
        "stages": st.sampled_from([0, 0, 1, 1, 3, 4]),
        "num_speculative_tokens": st.sampled_from([0, 2, 5]),
        "target_itl_s": st.sampled_from([None, None, 1e-9, 2.5]),  # the least is so short that no chunk fits
        "saturating_num_tokens": st.sampled_from([None, None, 5]),
        "is_wide": st.booleans(),  # else requests are plain: then what is rare with all kinds of them is not
        "padding": st.sampled_from([UNPADDED, StepPadding(((2, (2, 5)), (8, (3, 6))))]),
    }
)
WINDOWS = st.sampled_from([(None, None), (None, None), (None, 6), (7, 7), (None, 1), (9, 3), (None, 2)])


class EngineWatch(RuleBasedStateMachine):
    """The engine, what it was asked for, and the checks of each step."""

    @initialize(settings=SETTINGS, layer_windows=WINDOWS, num_more_blocks=st.integers(0, 5), seed=st.integers(0, 1000))
    def start(
        self, settings: dict[str, Any], layer_windows: tuple[int | None, ...], num_more_blocks: int, seed: int
    ) -> None:
        """num_more_blocks: than one sequence may need."""
        stages, self.is_wide = settings.pop("stages"), settings.pop("is_wide")
        config = EngineConfig(
            num_blocks=1000,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            async_scheduling=stages > 0,
            num_stages=max(1, stages),
            windows=tuple(dict.fromkeys(layer_windows)),  # layers that differ are in different groups
            **settings,
        )
        num_blocks = 1 + config.most_blocks(MAX_MODEL_LEN) + num_more_blocks
        self.config = config = dataclasses.replace(config, num_blocks=num_blocks)
        self.block_size = config.block_size
        self.model = FakeModel(num_blocks, self.block_size, windows=layer_windows)
        assert self.model.layout.windows == config.windows
        self.model.most_unknown = max(1, config.num_steps_ahead)
        self.tier = FakeTier(self.model)
        self.random = random.Random(seed)
        if seed % 3:
            self.model.chooses_nothing = lambda: self.random.random() < 0.1
        self.failing: set[Sequence] = set()  # in a step of these, a logits processor raises sooner or later
        self.model.fails = lambda seq: seq in self.failing and self.random.random() < 0.1
        self.now = 0.0
        self.engine = self.tier.engine = Engine(
            config, self.model, lambda: self.now, self.tier, lambda busy: self.random.random() < 0.05
        )
        self.model.blocks = self.engine.blocks
        self.requests: dict[AttemptId, Request] = {}
        self.queue: list[Sequence] = []  # as they arrived, until started
        self.leases: list[Lease] = []  # of `EngineHandoffs`, as is what moves
        self.moving: list[Sequence] = []  # stopped, to go on elsewhere or here
        self.num_scored: dict[Sequence, int] = {}  # prompt tokens whose logprobs have come
        self.may_sleep = False  # nothing has happened since the engine asked for no further turn
        self.held: list[list[int]] = []  # blocks promised to nothing in particular
        self.read: list[list[int]] = []  # blocks that are being gathered

    def live(self, state: SequenceState) -> list[Sequence]:
        requests = self.requests.values()
        known = [seq for request in requests for seq in (*request.sequences, *(request.beams or NO_BEAMS).members)]
        return [seq for seq in known if seq.state is state]

    def guess(self) -> None:
        """As a drafter does that is right every other time."""
        for seq in self.live(SequenceState.RUNNING):
            if seq.takes_drafts and self.random.random() < 0.7:
                output = self.requests[seq.attempt_id].expected[seq.samples[0]][0][seq.num_output_tokens :]
                guess = [token if self.random.random() < 0.7 else token + 1 for token in output]
                self.engine.propose(seq, guess + [3] * self.random.randrange(3))  # also beyond its end

    def compute(self, wait: bool = True) -> tuple[Plan, StepResult]:
        self.guess()
        if not wait and not self.engine.has_room:  # as a role does
            self.take(Plan(), self.engine.retire())
        self.awaited = {seq for seq in self.live(SequenceState.WAITING) if self.awaits_load(seq)}
        self.woken = False
        plan = self.engine.schedule(self.now)
        assert len(plan.chunks) <= self.config.max_num_seqs
        prompts = [chunk for chunk in plan.chunks if chunk.length > max(1, chunk.num_logits)]
        assert sum(chunk.length for chunk in prompts) <= self.config.max_num_batched_tokens
        assert self.woken or not (self.may_sleep and plan.chunks), "it did not ask for this turn"
        for seq in plan.preempted:
            if seq in self.moving:
                self.moving.remove(seq)
                self.engine.sequences.resume(seq)
        result = self.engine.compute(plan, wait)
        self.may_sleep = not (result.again or self.woken)
        return plan, result

    def wake(self) -> None:
        """Something has happened, perhaps during a turn."""
        self.may_sleep, self.woken = False, True

    def compiled(self) -> bool:
        """A matcher becomes ready."""
        done = self.random.random() < 0.1
        if done:
            self.wake()
        return done

    def take(self, plan: Plan, result: StepResult) -> None:
        for seq in plan.started:
            self.check_order(seq)
            self.queue.remove(seq)
            assert seq not in self.awaited or plan.evicted  # what is before the loading block may be gone since
            assert seq.num_cached_tokens % self.block_size == 0
            assert seq.num_cached_tokens < seq.num_tokens
            event(f"prefix hit {bool(seq.num_cached_tokens)}")
        if plan.preempted:
            event("preempted")
            assert all(not seq.hand_off for seq in plan.preempted)
            stayed = [seq.rank for seq in self.live(SequenceState.RUNNING) if not seq.hand_off]
            if not any(seq.beams for seq in plan.preempted):
                assert max(stayed, default=(-math.inf, 0)) <= min(seq.rank for seq in plan.preempted), "not the last"
        for seq, piece in result.prompt_logprobs:
            assert piece.first_index == self.num_scored.setdefault(seq, 1), "a gap or a repeat"
            self.num_scored[seq] += piece.num_tokens
        for token in result.sampled:
            self.hear(token)
        for seq in {token.sequence for token in result.sampled if token.sequence.hand_off}:
            self.hear_parked(seq)
        for group in result.searched:
            request = self.requests[group.attempt_id]
            assert not request.ended
            assert [(beam.tokens, beam.cumulative_logprob) for beam in group.best] == request.expected_beams
            request.found = request.expected_beams
            event("searched")
        for seq, failure in result.failed:
            request = self.requests[seq.attempt_id]
            assert request.fails or request.aborted, failure
            event("failed")
            self.end(seq.attempt_id)

    def end(self, attempt_id: AttemptId) -> None:
        """As a role ends an attempt: it knows the sequences that it was told of."""
        request = self.requests[attempt_id]
        request.aborted = True
        for seq in request.sequences * 2:  # once more changes nothing
            self.engine.sequences.release(seq)
        if request.beams is not None:
            self.engine.beam_search.end(request.beams)
        self.moving = [seq for seq in self.moving if seq not in request.sequences]
        self.queue = [seq for seq in self.queue if seq.attempt_id != attempt_id]

    def check_order(self, seq: Sequence) -> None:
        """Whoever is due earlier waits for a block, for its matcher, or for its lane."""
        waiting = self.engine.waiting
        before = [other for other in self.queue if other.due_s < seq.due_s]
        before += [other for other in self.queue[: self.queue.index(seq)] if other.due_s == seq.due_s]
        stuck = [name for name, lane in waiting._lanes.items() if lane.num_held and name != seq.lane]
        passed = [other for other in before if other.lane not in stuck]
        assert {*passed} <= self.awaited | waiting._deferred.keys(), "not in the order in which they are due"
        event(f"past others {bool(passed)}")
        event(f"past lanes {len(before) > len(passed)}")

    def hear_parked(self, seq: Sequence) -> None:
        assert seq.state is SequenceState.PARKED
        assert seq.num_computed_tokens == seq.num_tokens
        width = self.config.table_shape.width
        assert len(seq.block_table) == num_blocks_for(seq.num_tokens, self.block_size) * width
        if self.requests[seq.attempt_id].ended:  # all of it ended with its first token
            self.engine.sequences.release(seq)
            self.may_sleep = False

    def hear(self, token: SampledToken) -> None:
        request = self.requests[token.sequence.attempt_id]
        assert not request.aborted
        assert token.sample not in request.finished
        if token.sample not in request.expected:  # it was dropped before it had a sequence of its own
            if not token.sequence.hand_off:
                self.engine.sequences.release(token.sequence)
            return
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
        hashes = seq.block_hashes((seq.num_tokens - 1) // self.block_size, self.block_size)
        blocks = self.engine.blocks
        if self.config.table_shape.has_windows:
            return self.engine.tables.match(hashes)[1] is not None
        return any(map(blocks.is_loading, hashes[len(blocks.match(hashes)) :][:1]))

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "engine"):
            leases = [blocks for lease in self.leases for blocks in (lease.table, lease.spares)]
            held = [Holding("lease", "", NOBODY, (), 0.0, blocks) for blocks in leases + self.held]
            held += [Holding("gather", "", NOBODY, (), 0.0, blocks, KvUse.READS) for blocks in self.read]
            self.engine.check_integrity(held + self.tier.holdings())
            left = *self.engine.scheduler.running, *self.engine.waiting
            assert not any(self.requests[seq.attempt_id].aborted for seq in left), "it goes on after its end"
            assert self.engine.num_running + self.engine.scheduler.num_reserved_seqs <= self.config.max_num_seqs
