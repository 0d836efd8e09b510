"""What nodes tell of attempts: tokens in order of their indexes, the steps of a handoff, and ends.

Messages of two nodes overtake each other. What a decode node says of a sample before the prefill node's last word waits
in `SampleState.early`, and its End in `Attempt.end_waits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.errors import BatonError, InternalError, NodeUnavailable, PeerLost, TransferError
from baton.messages import Adopted, End, HandedOff, SampleEnd, Started, Stayed, Tokens, Update, UpdateKind
from baton.prompt_logprobs import PromptLogprobs
from router.placement.pool import Pool
from router.requests.actions import Outbox
from router.requests.attempts import Attempts
from router.requests.kv_flows import KvFlows
from router.requests.live_requests import LiveRequests
from router.requests.migrations import Migrations
from router.requests.recovery import NodeLost, Recovery
from router.requests.request_state import Attempt, AttemptState, RequestState, SampleEvent, SampleState


class Updates:
    """Carries each update into the attempt's and the request's state, and tells the client what is new."""

    def __init__(
        self,
        pool: Pool,
        attempts: Attempts,
        requests: LiveRequests,
        migrations: Migrations,
        recovery: Recovery,
        outbox: Outbox,
    ) -> None:
        self.kv_flows = KvFlows()
        self._pool = pool
        self._attempts = attempts
        self._requests = requests
        self._migrations = migrations
        self._recovery = recovery
        self._outbox = outbox
        self._takers: Mapping[type[UpdateKind], Callable[[RequestState, Attempt, Any, str, float], None]] = {
            Started: self._started,
            PromptLogprobs: self._prompt_logprobs,
            Tokens: self._tokens,
            SampleEnd: self._item,
            HandedOff: self._handed_off,
            Adopted: self._adopted,
            Stayed: self._stayed,
            End: self._told_end,
        }

    def take(self, incarnation: str, update: Update, now: float) -> None:
        """Take one update of a node. Anything of an attempt that is not current, or of a node that the attempt was not
        placed on, is late and ignored. But a decode node that begins with such an attempt has not been told that it is
        over: its session was down when the attempt ended, and the prefill node handed it over before it heard so."""
        found = self._attempts.find(update.attempt_id, incarnation)
        if found is None:
            if isinstance(update.kind, Adopted):
                self._attempts.abort_late(incarnation, update.attempt_id)
            return
        state, attempt = found
        if attempt.target is not None and not self._follow_move(state, attempt, update, incarnation, now):
            return
        self._takers[type(update.kind)](state, attempt, update.kind, incarnation, now)

    def _follow_move(self, state: RequestState, attempt: Attempt, update: Update, incarnation: str, now: float) -> bool:
        """Hand an attempt that is to move over to its target, if the update says that the target has it: as its first
        one does, and HandedOff of the node that generated. False: the target is lost, and so is the attempt."""
        kind, target = update.kind, attempt.target
        is_last_word = isinstance(kind, HandedOff) and incarnation == attempt.generates_on
        if incarnation != target and not is_last_word:
            if isinstance(kind, End):
                self._migrations.num_by_outcome["stayed" if kind.error is None else "lost"] += 1
            return True
        if attempt.target_lost:
            error = NodeLost("the decode node was lost to which the request has moved")
            self._migrations.num_by_outcome["lost"] += 1
            self._recovery.fail(state, attempt, error, now, {target} if target else None)
            return False
        self._migrations.handed_over(state, attempt)
        attempt.record.note_moved(state.timings.decode_node, now - state.arrived)
        return True

    # ---- the prompt ----

    def _started(self, state: RequestState, attempt: Attempt, started: Started, incarnation: str, now: float) -> None:
        attempt.record.note_started(started, now - state.arrived)
        if attempt.state is AttemptState.QUEUED:
            attempt.state = AttemptState.PREFILLING
        if attempt.decode is None:
            self._attempts.got_blocks(attempt)
        if attempt.id.attempt == 0:  # later ones compute output, too
            self._attempts.started(state, attempt, started.num_cached_tokens)
        if attempt.id.attempt == 0 or not state.timings.queue_s:
            state.timings.queue_s = started.queue_s
            state.timings.num_cached_tokens = started.num_cached_tokens

    def _prompt_logprobs(
        self, state: RequestState, attempt: Attempt, piece: PromptLogprobs, incarnation: str, now: float
    ) -> None:
        """Pass on what is new; an attempt repeats what an earlier one told."""
        try:
            fresh = state.take_prompt_logprobs(piece)
        except InternalError as error:
            self._recovery.fail(state, attempt, error, now, retry=True)
            return
        if fresh is not None:
            self._outbox.to_client(state.request.request_id, fresh)

    # ---- tokens ----

    def _tokens(self, state: RequestState, attempt: Attempt, tokens: Tokens, incarnation: str, now: float) -> None:
        self._pool.count_tokens(incarnation, len(tokens.token_ids))
        if self._take_next(state, attempt, tokens):
            self._outbox.to_client(state.request.request_id, tokens)
        else:
            self._item(state, attempt, tokens, incarnation, now)

    def _take_next(self, state: RequestState, attempt: Attempt, item: Tokens) -> bool:
        """Take tokens that nothing holds up, as nearly all updates are: the next ones of a sample that decodes. False:
        they may not be that, and `_item` has to look."""
        sample = attempt.samples[0]
        if (
            attempt.state is not AttemptState.DECODING
            or item.sample != sample.index
            or item.first_index != len(sample.tokens)
            or not item.token_ids
            or sample.ended
            or sample.early
            or sample.held
            or attempt.end_waits
            or not attempt.prefilled
            or not state.client_has_token  # nor, before it, all logprobs of the prompt
        ):
            return False
        sample.tokens.extend(item.token_ids)
        return True

    def _item(self, state: RequestState, attempt: Attempt, item: SampleEvent, incarnation: str, now: float) -> None:
        sample = attempt.sample(item.sample)
        if sample is None:
            unasked = InternalError(f"{attempt.id}: sample {item.sample} was not asked for")
            self._recovery.fail(state, attempt, unasked, now)
            return
        if sample.ended:
            return
        gap = isinstance(item, Tokens) and item.first_index > len(sample.tokens)
        may_overtake = incarnation == attempt.decode and not attempt.handed_off
        if may_overtake and (sample.early or gap or state.lacks_prompt_logprobs):
            sample.early.append(item)  # it overtook the prefill node's tokens
        elif self._accept(state, attempt, sample, item, now):
            self._after_progress(state, attempt, now)

    def _accept(
        self, state: RequestState, attempt: Attempt, sample: SampleState, item: SampleEvent, now: float
    ) -> bool:
        """Take one item in index order. False: the attempt failed."""
        if state.lacks_prompt_logprobs:
            lacking = InternalError(f"{attempt.id}: sample {sample.index} came before all logprobs of the prompt")
            self._recovery.fail(state, attempt, lacking, now, retry=True)
            return False
        if isinstance(item, SampleEnd):
            sample.ended = True
            sample.early.clear()
            self._outbox.tell(state, attempt, sample, item, now)
            return True
        have = len(sample.tokens)
        if item.first_index > have:
            gap = InternalError(f"{attempt.id}: sample {sample.index} jumps from token {have} to {item.first_index}")
            self._recovery.fail(state, attempt, gap, now, retry=True)
            return False
        known = have - item.first_index  # repeated tokens
        fresh = item.token_ids[known:]
        if fresh:
            self._attempts.prefilled(attempt, now)
            sample.tokens.extend(fresh)
            if attempt.decode and attempt.state is not AttemptState.DECODING:
                attempt.state = AttemptState.HANDING_OFF
            elif not attempt.decode:
                attempt.state = AttemptState.DECODING
                self._pool.worked(attempt.prefill)
            fresh_item = Tokens(sample.index, have, fresh, item.logprobs[known:])
            self._outbox.tell(state, attempt, sample, fresh_item, now)
        return True

    def _after_progress(self, state: RequestState, attempt: Attempt, now: float) -> None:
        """Take items that waited for tokens of the prefill node. After its last message, a gap is an error."""
        for sample in attempt.samples:
            while sample.early:
                head = sample.early[0]
                if isinstance(head, Tokens) and head.first_index > len(sample.tokens) and not attempt.handed_off:
                    break
                sample.early.pop(0)
                if not self._accept(state, attempt, sample, head, now):
                    return
        if attempt.end_waits and not any(s.early for s in attempt.samples):
            self._ended(state, attempt, None, attempt.decode or attempt.prefill, now)

    # ---- handoffs ----

    def _handed_off(
        self, state: RequestState, attempt: Attempt, handed_off: HandedOff, incarnation: str, now: float
    ) -> None:
        if attempt.handed_off or attempt.decode is None or incarnation != attempt.prefill:
            return
        self._attempts.prefilled(attempt, now)
        attempt.handed_off = True
        self._pool.worked(attempt.prefill)
        if not attempt.visited:
            state.timings.handed_off(handed_off)
            attempt.record.note_handed_off(handed_off, now - state.arrived)
        self._after_progress(state, attempt, now)

    def _adopted(self, state: RequestState, attempt: Attempt, adopted: Adopted, incarnation: str, now: float) -> None:
        self._attempts.prefilled(attempt, now)
        attempt.state = AttemptState.DECODING
        if not attempt.visited:
            attempt.record.note_adopted(adopted, now - state.arrived)
        self._attempts.got_blocks(attempt)
        for sample in attempt.samples:
            self._outbox.release(state, sample, now)
        self._pool.worked(incarnation)
        self.kv_flows.add(attempt.prefill, incarnation, adopted.transfer_bytes)
        if not attempt.visited:
            # Not before: what has left one node may arrive damaged at the other.
            self._pool.pair_breakers.worked((attempt.prefill, incarnation))
            state.timings.adopted(adopted)
            self._pool.handed_over(incarnation, adopted.handoff_s, now)

    def _stayed(self, state: RequestState, attempt: Attempt, stayed: Stayed, incarnation: str, now: float) -> None:
        self._migrations.stayed(state, attempt, stayed, now)

    # ---- ends ----

    def _told_end(self, state: RequestState, attempt: Attempt, end: End, incarnation: str, now: float) -> None:
        attempt.record.note_reported(end)
        self._ended(state, attempt, end.error, incarnation, now)

    def _ended(
        self, state: RequestState, attempt: Attempt, error: BatonError | None, incarnation: str, now: float
    ) -> None:
        if error is not None:
            suspects = attempt.suspects(error, incarnation)
            if isinstance(error, NodeUnavailable):  # what a node refuses that stops, the other one may go on with
                suspects = suspects & self._attempts.leaving(attempt) or suspects
            if isinstance(error, PeerLost):
                state.blamed |= suspects
            if isinstance(error, TransferError) and attempt.decode and not attempt.fails_to_move(error):
                self._pool.pair_breakers.failed((attempt.prefill, attempt.decode), error.message, now)
            if isinstance(error, InternalError):
                for suspect in suspects:
                    self._pool.failed(suspect, error.message, now)
            self._recovery.fail(state, attempt, error, now, suspects)
        elif not attempt.unfinished:
            if incarnation == attempt.decode and not attempt.handed_off:
                # its last word is still under way and says nothing new
                self._attempts.abort_on(attempt.prefill, attempt)
            elif attempt.decode and incarnation == attempt.prefill:  # its first tokens were the whole answer
                self._pool.worked(incarnation)
            self._attempts.retire(state, attempt, now)
            self._requests.end_if_done(state, now)
        elif incarnation == attempt.decode and not attempt.handed_off:
            attempt.end_waits = True
        else:
            early = InternalError(f"{attempt.id} ended with unfinished samples")
            self._recovery.fail(state, attempt, early, now, retry=True)
