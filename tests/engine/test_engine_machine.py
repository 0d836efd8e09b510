"""Engine and scheduler under random arrivals, aborts, leases, handoffs and moves, in pools small enough to evict and
preempt."""

from __future__ import annotations

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from baton.messages import AttemptId
from baton.sampling import SamplingParams
from engine.sequence import Sequence, SequenceState
from tests.engine.engine_handoffs import EngineHandoffs
from tests.engine.engine_watch import MAX_MODEL_LEN, Request
from tests.engine.forcing import Forcing
from tests.machines import machine
from tests.protocol.fake_model import expected_output


class EngineMachine(EngineHandoffs):
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
        seq = Sequence(attempt_id, samples, prompt, sampling, given, hand_off, salt, self.now, runs_ahead=runs_ahead)
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
