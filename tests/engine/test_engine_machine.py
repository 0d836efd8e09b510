"""Engine and scheduler under random arrivals, aborts, leases, handoffs and moves, in pools small enough to evict and
preempt."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.errors import InvalidRequest
from baton.messages import AttemptId
from baton.sampling import FinishReason, SamplingParams
from engine.beams import BeamGroup
from engine.sequence import Sequence, SequenceState
from tests.engine.beam_reference import beam_search
from tests.engine.engine_handoffs import EngineHandoffs
from tests.engine.engine_watch import MAX_MODEL_LEN, Request
from tests.engine.forcing import Compiling, Forcing
from tests.machines import machine
from tests.protocol.fake_model import EOS, expected_output, most_likely


@dataclass(frozen=True)
class Wishes:
    """What a request asks for. `finishes_after`, `fails_after`: so many tokens its matcher ends it, or fails."""

    prefix: tuple[int, ...]
    suffix: list[int]
    samples: tuple[int, ...]
    sampling: SamplingParams
    hand_off: bool
    num_given: int
    salt: str
    scored: int | None
    priority: int
    lane: str
    matcher: str
    ends_after: int | None
    may_fail: bool


WISHES = st.builds(
    Wishes,
    prefix=st.sampled_from([(5, 6, 7, 8, 9, 10, 11, 12), (5, 6, 7, 8, 1, 1)]),
    suffix=st.lists(st.integers(2, 3), max_size=6),
    samples=st.sampled_from([(0,), (0,), (0, 1), (0, 1, 2), (2,), (1, 3)]),
    sampling=st.builds(
        SamplingParams,
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 30),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([*[frozenset()] * 5, frozenset(range(10))]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    ),
    hand_off=st.sampled_from([False, False, True]),
    num_given=st.integers(0, 3),
    salt=st.sampled_from(["", "", "salt"]),
    scored=st.sampled_from([None, None, 0]),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    lane=st.sampled_from(["a", "b"]),
    matcher=st.sampled_from([*[""] * 6, "forces", "forces", "fails", "finishes", "compiles"]),
    ends_after=st.integers(1, 12),
    may_fail=st.sampled_from([*[False] * 9, True]),
)


class EngineMachine(EngineHandoffs):
    @rule(wishes=WISHES)
    def arrive(self, wishes: Wishes) -> None:
        if self.num_live() >= 8:
            return
        if not self.is_wide:
            matcher = wishes.matcher if wishes.matcher == "forces" else ""
            sampling = SamplingParams(seed=wishes.sampling.seed, max_tokens=wishes.sampling.max_tokens)
            wishes = replace(wishes, matcher=matcher, sampling=sampling, priority=0, lane="", may_fail=False)
        prompt, samples, sampling = (*wishes.prefix, *wishes.suffix), list(wishes.samples), wishes.sampling
        expected = {s: expected_output(prompt, sampling, s, MAX_MODEL_LEN) for s in samples}
        first = expected[samples[0]][0]
        given = first[: min(wishes.num_given, len(first) - 1)] if len(samples) == 1 else []
        self.now += 1
        runs_ahead = not self.config.num_speculative_tokens or self.random.random() < 0.3
        seq = Sequence(
            AttemptId(1, str(len(self.requests)), 0),
            samples,
            prompt,
            sampling,
            given,
            wishes.hand_off,
            wishes.salt,
            self.now,
            priority=wishes.priority,
            lane=wishes.lane if wishes.lane and wishes.hand_off else None,
            runs_ahead=runs_ahead,
            num_prompt_logprobs=wishes.scored,
        )
        request = Request(expected, {s: list(given) for s in samples}, [seq], fails=wishes.may_fail)
        if wishes.may_fail:
            self.failing.add(seq)
            seq.runs_ahead = False
        if wishes.matcher:
            self.constrain(request, seq, wishes)
        self.engine.add(seq)
        self.requests[seq.attempt_id] = request
        self.queue.append(seq)
        self.may_sleep = False
        self.steps(self.random.choice([0, 0, 1, 3, 8]))

    def constrain(self, request: Request, seq: Sequence, wishes: Wishes) -> None:
        end, kind = seq.num_output_tokens + (wishes.ends_after or 0), wishes.matcher
        seq.runs_ahead = False
        seq.matcher = Forcing(
            self.random,
            tuple(seq.prompt_tokens),
            seq.sampling.seed + seq.samples[0] if len(seq.samples) == 1 else None,
            list(seq.output_tokens),
            finishes_at=end if kind == "finishes" else None,
            fails_at=end if kind == "fails" else None,
            compiling=Compiling(kind != "compiles", self.compiled),
        )
        request.fails |= kind == "fails"
        if kind == "finishes":
            cut = {s: output[:end] for s, (output, _) in request.expected.items() if len(output) >= end}
            request.expected |= {s: (output, FinishReason.STOP) for s, output in cut.items()}

    @precondition(lambda self: self.is_wide)
    @rule(
        length=st.integers(1, 12),
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, -1, 1]),
    )
    def search(self, length: int, width: int, max_tokens: int, priority: int) -> None:
        if self.num_live() >= 8:
            return
        try:
            self.engine.beam_search.require_possible(width, length + max_tokens)
        except InvalidRequest:
            return
        prompt = tuple(range(2, 2 + length))
        sampling = SamplingParams(temperature=0.0, beam_width=width, max_tokens=max_tokens)
        attempt_id = AttemptId(1, str(len(self.requests)), 0)
        group = BeamGroup[Sequence](attempt_id, length, sampling, (EOS,))
        self.now += 1
        inner = BeamGroup.sampling_of(sampling)
        seq = Sequence(attempt_id, [0], prompt, inner, arrived_s=self.now, priority=priority, beams=group)
        found = beam_search(lambda tokens: most_likely(tokens, 2 * width), prompt, width, max_tokens, (EOS,))
        self.engine.add(seq)
        self.engine.beam_search.begin(seq)
        self.requests[attempt_id] = Request({}, {}, [], found, beams=group)
        self.queue.append(seq)
        self.may_sleep = False

    def num_live(self) -> int:
        return sum(not request.ended for request in self.requests.values())

    @precondition(lambda self: self.is_wide)
    @rule(seconds=st.sampled_from([0.0, 10.0]), times=st.integers(1, 3))
    def begin_until(self, seconds: float, times: int) -> None:
        """As while something that is due then waits for room."""
        self.engine.waiting.begins_until_s = self.now + seconds
        self.steps(times)
        self.engine.waiting.begins_until_s = math.inf
        self.may_sleep = False

    @precondition(lambda self: self.is_wide and self.droppable())
    @rule(data=st.data())
    def drop_sample(self, data: st.DataObject) -> None:
        """The router has found a stop string: a role ends a sample that has a sequence of its own, and any other once
        it gets one."""
        attempt_id, sample = data.draw(st.sampled_from(self.droppable()))
        request = self.requests[attempt_id]
        del request.expected[sample]
        for seq in [seq for seq in request.sequences if seq.samples == [sample] and not seq.hand_off]:
            self.engine.sequences.release(seq)
            self.moving = [other for other in self.moving if other is not seq]
        self.may_sleep = False

    def droppable(self) -> list[tuple[AttemptId, int]]:
        """Not of a request that has no other, which is aborted instead."""
        leased = {lease.source.attempt_id for lease in self.leases}
        found = list[tuple[AttemptId, int]]()
        for attempt_id, request in self.requests.items():
            left = request.expected.keys() - request.finished.keys()
            if not request.ended and len(left) > 1 and attempt_id not in leased:
                found += [(attempt_id, sample) for sample in sorted(left)]
        return found

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        self.steps(times)

    @rule(times=st.integers(1, 3))
    def step_on(self, times: int) -> None:
        """Once more: most of what happens, happens in steps."""
        self.steps(times)

    @rule(times=st.integers(1, 12), pieces=st.integers(1, 20))
    def turn(self, times: int, pieces: int) -> None:
        """As a role does, which does not wait for steps: the device goes on between its turns."""
        for _ in range(times):
            for _ in range(self.random.randrange(pieces)):
                if self.model.is_busy:
                    self.model.advance()
            self.steps(1, waits=False)

    def steps(self, times: int, waits: bool = True) -> None:
        self.may_sleep = False
        for _ in range(times):
            self.now += 1
            before = [seq for seq in self.live(SequenceState.WAITING) if seq.num_preemptions]
            # What is before the block that is being loaded for it may have been evicted since: it still waits.
            before = [seq for seq in before if not self.awaits_load(seq) and seq not in self.engine.waiting._deferred]
            plan, result = self.compute(waits)
            self.take(plan, result)
            self.whole()
            before = [seq for seq in before if seq not in self.engine.waiting._deferred]
            if plan.started:  # one that is due earlier may have waited for a load meanwhile
                latest = max(seq.due_s for seq in plan.started)
                passed = [seq for seq in before if seq.state is SequenceState.WAITING and seq.due_s <= latest]
                assert not passed, "newcomers went first"

    @precondition(lambda self: any(not request.ended for request in self.requests.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        attempts = [attempt_id for attempt_id, request in self.requests.items() if not request.ended]
        attempt_id = data.draw(st.sampled_from(attempts))
        for lease in [lease for lease in self.leases if lease.source.attempt_id == attempt_id]:
            self.drop(lease)
        self.end(attempt_id)
        self.may_sleep = False

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
        while self.read:
            self.end_read()
        for _ in range(2000):
            self.may_sleep = False
            plan, result = self.compute()
            self.take(plan, result)
            for seq in self.parked():
                self.end(seq.attempt_id)
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
