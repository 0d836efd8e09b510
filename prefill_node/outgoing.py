"""The prefill node's requests, each on its way to a decode node: Reserve, Grant, parts, Commit, and one exit.

Nothing here runs a model. Memory on D is reserved when a prompt's first chunk is scheduled (so queued prompts hold
nothing there), and granted while that chunk is computed. Parts leave as their blocks are computed and D has slots
(`node.handoffs.parts_out`). The first token goes to the router once D has granted, and the Commit gives the request to
D.
"""

from __future__ import annotations

from dataclasses import replace

from baton.deadlines import Deadlines, earliest
from baton.errors import BatonError, DeadlineExceeded, PeerLost
from baton.handoff_messages import Reserve
from baton.messages import AttemptId, End, HandedOff, Prefill, Started
from engine.engine import Engine
from engine.holdings import Holding
from engine.sequence import Sequence
from engine.step import SampledToken
from node.handoffs.parts_out import PartsOut
from node.handoffs.sender_core import KvSenderCore
from node.outbox import Outbox
from prefill_node.handoff import Handoff, HandoffState, needs_decode_node

SPREAD_SHARE = 0.5
"""The parts of a chunk leave within this share of the time that the prompt's next chunk takes. If those of 8,192 tokens
left at once, they would keep the decode node's memory, and its threads that receive them, busy for some milliseconds: a
step that runs meanwhile would take a fifth longer."""


class Outgoing(KvSenderCore[Handoff]):
    """Tracks prompts from intake on, also while they wait in the engine's queue. Releases their sequences in the
    engine, and tells routers through `outbox`."""

    def __init__(self, engine: Engine, parts: PartsOut, outbox: Outbox) -> None:
        super().__init__(engine, parts, outbox)
        self._deadlines = Deadlines[AttemptId]()

    def add(self, prefill: Prefill, sequence: Sequence, now: float, deadline: float) -> None:
        self._sendings[prefill.attempt_id] = Handoff(
            attempt_id=prefill.attempt_id,
            sequence=sequence,
            target=prefill.decode,
            deadline=deadline,
            message=prefill,
            received=now,
        )
        self._deadlines.set(prefill.attempt_id, deadline)

    def next_deadline(self) -> float | None:
        return earliest(self._deadlines.next(), super().next_deadline())

    def holdings(self) -> list[Holding]:
        """The engine's holdings, each with its lease on the decode node, if there is one."""
        return [self._with_lease(holding) for holding in self._engine.sequences.holdings()]

    def _with_lease(self, holding: Holding) -> Holding:
        handoff = self._sendings.get(holding.attempt_id)
        if handoff is None or handoff.target is None:
            return holding
        lease = handoff.grant.lease if handoff.grant else 0
        return replace(holding, lease=lease, peer=handoff.target.incarnation)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._deadlines) == len(self._sendings)

    # ---- what the engine did ----

    def started(self, sequence: Sequence, now: float) -> None:
        """The prompt's first chunk is scheduled: send D a Reserve, if there will be anything to decode."""
        handoff = self._sendings[sequence.attempt_id]
        handoff.started = now
        self._outbox.to_router(sequence.attempt_id, Started(sequence.num_cached_tokens, now - handoff.received))
        prefill = handoff.message
        if prefill.decode is None or not needs_decode_node(prefill):
            return
        block_size = self._engine.config.block_size
        handoff.grouped_from_block, handoff.layer_groups = self._parts.tail(sequence)
        reserve = Reserve(
            attempt_id=prefill.attempt_id,
            target_incarnation=prefill.decode.incarnation,
            num_tokens=sequence.num_tokens,
            block_hashes=tuple(sequence.block_hashes(sequence.num_tokens // block_size, block_size)),
            num_samples=max(len(prefill.samples), prefill.sampling.beam_width),
            deadline_s=handoff.deadline - now,
            max_total_tokens=len(prefill.prompt_tokens) + prefill.sampling.max_tokens,
            grouped_from_block=handoff.grouped_from_block,
            layer_groups=handoff.layer_groups,
            priority=prefill.priority,
            age_s=prefill.age_s + now - handoff.received,
            goes_on=prefill.goes_on,
        )
        self._reserve(handoff, reserve)

    def sampled(self, token: SampledToken) -> None:
        # The clock is asked again, since on a CPU the step was computed within the turn.
        self._sendings[token.sequence.attempt_id].sampled(token, self._engine.clock())

    def advanced(self, sequence: Sequence, device_s: float) -> None:
        """A chunk of the prompt is computed, in a step that the device computed in `device_s`. Its parts are spread
        over a share of the time that the next chunk will take; those of the last chunk leave at once."""
        if handoff := self._sendings.get(sequence.attempt_id):
            handoff.num_chunks += 1
            num_left = sequence.num_tokens - sequence.num_computed_tokens
            share = min(1.0, num_left / self._engine.config.max_num_batched_tokens)
            handoff.spread(self._engine.clock(), SPREAD_SHARE * share * device_s)
        self._touch(sequence.attempt_id)

    # ---- moving on ----

    def _layers_computed(self) -> dict[Sequence, int]:
        return self._engine.layers_computed()

    def _advance(self, sending: Handoff, now: float) -> None:
        if sending.state is HandoffState.COMPUTING and sending.computed is not None:
            if not sending.outputs:  # every sample ended with its first token
                self._tell_results(sending)
                self._finish(sending, End(prompt=sending.times()))
            elif sending.grant and sending.target:
                self._tell_results(sending)
                age_s = self._engine.clock() - sending.computed
                self._outbox.to_decode(sending.target, sending.commit(sending.grant, now, age_s))
                sending.state = HandoffState.SENDING
        if sending.state is HandoffState.SENDING and sending.all_gathered:
            self._engine.sequences.release(sending.sequence)
            if sending.accepted and sending.all_sent:
                self._finish(sending, sending.handed_off())

    def _tell_results(self, handoff: Handoff) -> None:
        for result in handoff.results:
            self._outbox.to_router(handoff.attempt_id, result)

    # ---- ends ----

    def end_attempt(self, attempt_id: AttemptId, error: BatonError) -> None:
        """A no-op if it is not here."""
        if handoff := self._sendings.get(attempt_id):
            self._finish(handoff, End(error, handoff.times()))

    def end_overdue(self, now: float) -> None:
        super().end_overdue(now)
        for attempt_id in self._deadlines.due(now):
            handoff = self._sendings[attempt_id]
            self._finish(handoff, End(DeadlineExceeded(f"not handed off within {handoff.message.deadline_s:g} s")))

    def _refused(self, sending: Handoff, error: BatonError) -> None:
        self._finish(sending, End(error))

    def _commit_refused(self, sending: Handoff, error: BatonError) -> None:
        self._finish(sending, End(error))

    def _lost(self, sending: Handoff, error: PeerLost) -> None:
        self._finish(sending, End(error))

    def _finish(self, handoff: Handoff, last_word: End | HandedOff) -> None:
        """The only exit of a handoff: frees its blocks and sends the router its final update."""
        self._deadlines.discard(handoff.attempt_id)
        self._engine.sequences.release(handoff.sequence)
        self._outbox.to_router(handoff.attempt_id, last_word)
        self._let_go(handoff, release=isinstance(last_word, End))
