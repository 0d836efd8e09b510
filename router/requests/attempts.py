"""Which attempts at requests are on which nodes, and which wait for one: placed, fenced and forgotten here.

What an attempt's tokens mean for its request is for `updates` to say, and whether another attempt follows, for
`recovery`.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence

from baton.errors import BatonError, InvalidRequest, NodeUnavailable
from baton.messages import Abort, AttemptId, DecodeTarget
from baton.node_info import NodeRole
from router.placement.pending_blocks import PendingBlocks
from router.placement.placement import Placement
from router.placement.pool import Pool, TooLargeForNow
from router.placement.prefix_index import PrefixIndex
from router.requests.actions import Outbox
from router.requests.request_state import Attempt, AttemptState, RequestState, SampleState, Unplaced
from router.requests.waiting import WaitingRoom
from router.versions import ModelVersion, VersionGone

log = logging.getLogger(__name__)

LEAST_DEADLINE_S = 1e-3
"""What an Abort states of an attempt that was late when it was placed. 0 would be no deadline, and nodes that never
heard of the attempt would remember it for hours."""


class Attempts:
    """Uses the pool's nodes, and tells them through `outbox`; `index` says what they hold. Keeps up to date
    `RequestState.attempts` and `unplaced`, and the part of their timings that is about nodes. `waiting`: those
    that have no node yet."""

    def __init__(self, epoch: int, pool: Pool, index: PrefixIndex, outbox: Outbox, waiting: WaitingRoom) -> None:
        self._epoch = epoch
        self._index = index
        self._pending = PendingBlocks()
        self._pool = pool
        self._outbox = outbox
        self._live: dict[AttemptId, tuple[RequestState, Attempt]] = {}
        self._waiting = waiting
        self.num_placements: Counter[str] = Counter({"pair": 0, "decode_alone": 0, "waited": 0})

    def find(self, attempt_id: AttemptId, incarnation: str) -> tuple[RequestState, Attempt] | None:
        """The live attempt of that name and its request, if it was placed on that node."""
        found = self._live.get(attempt_id)
        if found is None:
            return None
        attempt = found[1]
        if incarnation != attempt.decode and incarnation != attempt.prefill and incarnation != attempt.target:
            return None
        return found

    def generating_on(self, incarnation: str) -> list[tuple[RequestState, Attempt]]:
        """The live attempts that generate on that node, or will."""
        return [found for found in self._live.values() if found[1].generates_on == incarnation]

    def moving_to(self, incarnation: str) -> list[tuple[RequestState, Attempt]]:
        return [found for found in self._live.values() if found[1].target == incarnation]

    def states(self) -> list[AttemptState]:
        """Of all live work, waiting or placed."""
        placed = [attempt.state for _, attempt in self._live.values()]
        return placed + [AttemptState.UNPLACED] * len(self._waiting)

    # ---- placing ----

    def choose(self, state: RequestState, samples: Sequence[SampleState], now: float) -> Placement | None:
        """See Pool.choose: for these samples, among the nodes of the request's version. If those are gone while another
        version of its model is served, a request of which nothing is told yet becomes one of that. Raises VersionGone
        if it cannot."""
        request = state.request
        held = dict(self._pending.held(request.block_hashes))
        for incarnation, number in self._index.held(request.block_hashes).items():
            held[incarnation] = max(number, held.get(incarnation, 0))
        num_tokens, n = num_tokens_of(state, samples), num_continued(state, samples)
        placement = self._pool.choose(state.avoid, now, num_tokens, held, state.version, n)
        if placement is None and state.version and (successors := self._pool.successors(state.version)):
            state.version = _successor(state, state.version, successors)
            placement = self._pool.choose(state.avoid, now, num_tokens, held, state.version, n)
        return placement

    def place_or_wait(self, task: Unplaced, placement: Placement | None, now: float) -> None:
        """A decode node's free blocks are credits: what it has no room for waits here, and so does what comes behind
        that. Raises NodeUnavailable when there is no node, nor a place to wait, and Full when there is no room."""
        if placement is None:
            self._waiting.add_for_node(task, self._pool.why_not_ready(task.request_state.version) or "no node", now)
        elif not placement.has_room or (len(self._waiting) and self._waiting.is_behind_others(task)):
            self._waiting.add_for_room(task, now)
        else:
            self._place(task, placement, now)
            return
        self.num_placements["waited"] += 1

    def place_waiting(self, now: float) -> list[tuple[RequestState, BatonError]]:
        """A node has come, or has told its load: what waits is placed, in the order in which it is due. Of each version
        the first for which there is no room has the others wait, and so does the first of nodes of which no pair fits.
        Returns those that wait in vain."""
        in_vain = list[tuple[RequestState, BatonError]]()
        if not self._waiting:
            return in_vain
        self._follow_versions()
        for tasks in self._waiting.queues():
            for task in tasks:
                try:
                    placement = self.choose(task.request_state, task.samples, now)
                except (VersionGone, TooLargeForNow, InvalidRequest) as error:
                    in_vain.append((task.request_state, task.refused(error)))
                    continue
                except NodeUnavailable as misfit:  # a node that fits may come yet, and the request has a deadline
                    if self._pool.why_not_ready(task.request_state.version):
                        break  # a thousand may wait: each would compare all nodes, for nothing, with each load
                    task.error = misfit
                    continue
                if placement is None or not placement.has_room:
                    break
                self._waiting.placed(task, now)
                self._place(task, placement, now)
        return in_vain

    def _follow_versions(self) -> None:
        """What waits for a version that is gone waits among what is of its successor: else newer requests of that would
        overtake it. Those that cannot become one of it are told so when they are to be placed."""
        for version in self._waiting.versions():
            if self._pool.role(NodeRole.DECODE, version) or not (successors := self._pool.successors(version)):
                continue
            for task in self._waiting.of(version):
                with contextlib.suppress(VersionGone):
                    self._waiting.follow(task, _successor(task.request_state, version, successors))

    def _place(self, task: Unplaced, placement: Placement, now: float) -> None:
        """Have the nodes work on the task: on those of its samples that have not ended while it waited."""
        state = task.request_state
        if placement.decode and not state.request.has_prefill:
            placement = Placement(placement.decode, None, placement.option.alone, placement.options)
        last = placement.last
        nodes = placement.prefill.info.node_id, last.info.node_id
        attempt = self._new_attempt(task, placement, nodes, now)
        state.attempts[attempt.id] = attempt
        self._live[attempt.id] = state, attempt
        state.version = last.version
        self._report(task, placement, nodes, now)
        last.num_promised += attempt.num_promised
        self._pool.place(placement, attempt.num_tokens, now, attempt.num_answers)
        for incarnation in attempt.placed_on:
            self._pending.add(incarnation, state.request.block_hashes)
        decode = placement.decode.info if placement.decode else None
        target = DecodeTarget(decode.address, decode.incarnation) if decode else None
        self._outbox.to_node(attempt.prefill, state.prefill(attempt, target, now), task.cause)

    def _new_attempt(self, task: Unplaced, placement: Placement, nodes: tuple[str, str], now: float) -> Attempt:
        """`nodes`: the names of the node that computes the prompt, and of the one that generates."""
        state, samples = task.request_state, [sample for sample in task.samples if not sample.ended]
        num_tokens, n = num_tokens_of(state, task.samples), num_continued(state, task.samples)
        if not n and placement.decode is None:
            n = len(task.samples)  # the prompt is computed there, which takes blocks even if no answer goes on
        indexes = tuple([sample.index for sample in samples])
        estimate = placement.estimate(self._pool.policy_name)
        return Attempt(
            id=AttemptId(self._epoch, task.key, task.attempt),
            samples=samples,
            prefill=placement.prefill.info.incarnation,
            decode=placement.decode.info.incarnation if placement.decode else None,
            deadline_s=state.deadline - now,
            record=state.record.placed(task.attempt, indexes, nodes, estimate, now - state.arrived),
            prefill_s=placement.prefill_s,
            num_promised=placement.num_blocks(num_tokens, n),
            num_answers=n,
            num_tokens=num_tokens,
        )

    def _report(self, task: Unplaced, placement: Placement, nodes: tuple[str, str], now: float) -> None:
        """Tell of the placement in metrics, in the log and in the request's timings."""
        self.num_placements[placement.kind] += 1
        state, timings = task.request_state, task.request_state.timings
        if log.isEnabledFor(logging.DEBUG):
            log.debug("placed attempt=%d %s", task.attempt, placement, extra={"request_id": state.request.request_id})
        if task.attempt == 0:
            timings.expected_first_token_s = now - state.arrived + placement.expected_first_token_s
        timings.num_attempts = max(timings.num_attempts, task.attempt + 1)
        timings.prefill_node, timings.decode_node = nodes

    def is_on(self, incarnation: str) -> bool:
        """Whether an attempt still needs that node, or may be about to: nobody knows yet whether it has moved there."""
        return any(
            attempt.depends_on(incarnation) or attempt.target == incarnation for _, attempt in self._live.values()
        )

    def leaving(self, attempt: Attempt) -> set[str]:
        """Those of its nodes that take no new work."""
        nodes = [self._pool.get(incarnation) for incarnation in attempt.placed_on]
        return {node.info.incarnation for node in nodes if node is not None and not node.takes_work}

    # ---- moving ----

    def move(self, state: RequestState, attempt: Attempt) -> None:
        """The node that generated has handed the attempt over to its target, or is about to say so."""
        assert attempt.target
        source, target = attempt.generates_on, attempt.target
        self.got_blocks(attempt)  # as it has where it generated, whatever that has said
        for incarnation in attempt.placed_on:
            self._pending.remove(incarnation, state.request.block_hashes)
        self._pool.will_decode(source, -attempt.num_tokens, -attempt.num_answers)
        attempt.visited |= set(attempt.placed_on)
        attempt.prefill, attempt.decode, attempt.handed_off = source, target, False
        attempt.target = None
        for incarnation in attempt.placed_on:
            self._pending.add(incarnation, state.request.block_hashes)
        if node := self._pool.get(target):
            state.timings.decode_node = node.info.node_id

    def forget_target(self, state: RequestState, attempt: Attempt) -> None:
        """It does not move, or does no more."""
        if attempt.target is not None and not attempt.target_lost:
            self._pool.will_decode(attempt.target, -attempt.num_tokens, -attempt.num_answers)
        attempt.target, attempt.target_lost = None, False

    # ---- progress, end ----

    def started(self, state: RequestState, attempt: Attempt, num_cached: int) -> None:
        """Its prefill node has begun, with so many of the prompt's tokens from its cache. If others have told of the
        prompt's end before, this completes the count of what was computed."""
        attempt.num_cached = num_cached
        if attempt.prefilled:
            self._pool.count_tokens(attempt.prefill, attempt.num_tokens - num_cached)

    def prefilled(self, attempt: Attempt, now: float, begun: bool = True) -> None:
        """Its prompt keeps nobody waiting any more. Once more does nothing. `begun`: see Pool.prefilled."""
        if not attempt.prefilled:
            attempt.prefilled = True
            num_computed = attempt.num_tokens - attempt.num_cached if attempt.num_cached is not None else None
            self._pool.prefilled(attempt.prefill, attempt.num_tokens, attempt.prefill_s, now, num_computed, begun)

    def got_blocks(self, attempt: Attempt) -> None:
        """The node that generates has given it its blocks. Once more does nothing."""
        self._pool.settle(attempt.generates_on, attempt.num_promised)
        attempt.num_promised = 0

    def abort(self, attempt: Attempt, samples: tuple[int, ...] = ()) -> None:
        """Tell all nodes that may still hold something of it; `samples`: that these alone are over."""
        for incarnation in attempt.nodes():
            self.abort_on(incarnation, attempt, samples)

    def abort_on(self, incarnation: str, attempt: Attempt, samples: tuple[int, ...] = ()) -> None:
        if self._pool.get(incarnation):
            deadline_s = attempt.deadline_s if attempt.deadline_s > LEAST_DEADLINE_S else LEAST_DEADLINE_S
            self._outbox.to_node(incarnation, Abort(attempt.id, samples, deadline_s))

    def abort_late(self, incarnation: str, attempt_id: AttemptId) -> None:
        """Tell the node again, if not for the first time: it has an attempt that is over."""
        self._outbox.to_node(incarnation, Abort(attempt_id, (), LEAST_DEADLINE_S))

    def retire(self, state: RequestState, attempt: Attempt, now: float) -> None:
        """It is over: nothing that a node says of it counts any more."""
        del state.attempts[attempt.id]
        del self._live[attempt.id]
        attempt.record.ended_at_s, attempt.record.state = now - state.arrived, attempt.state.value
        self.forget_target(state, attempt)
        self.got_blocks(attempt)
        if not attempt.prefilled:
            attempt.num_cached = None  # it was not computed to its end
        self.prefilled(attempt, now, begun=attempt.state is not AttemptState.QUEUED)
        for incarnation in attempt.placed_on:
            self._pending.remove(incarnation, state.request.block_hashes)
        had_blocks = attempt.state is AttemptState.DECODING
        held_s = now - (state.deadline - attempt.deadline_s) if had_blocks else None
        self._pool.ended(attempt.decode or attempt.prefill, attempt.num_tokens, attempt.num_answers, held_s)


def _successor(state: RequestState, gone: ModelVersion, successors: list[ModelVersion]) -> ModelVersion:
    """The version that a request goes on with. Raises VersionGone."""
    why = f"no node that serves {gone.id} is left"
    if state.has_begun:
        raise VersionGone(f"{why}, and {successors[0].id} is another model than the answer began with")
    successor = next((successor for successor in successors if successor.prompt_format == gone.prompt_format), None)
    if successor is None:
        raise VersionGone(f"{why}, and to {successors[0].id} the prompt would be another one: send it again")
    return successor


def num_tokens_of(state: RequestState, samples: Sequence[SampleState]) -> int:
    """What a node computes before these samples go on: the prompt, and the output that there is (then it is one)."""
    return len(state.request.prompt_tokens) + _num_output(samples)


def num_continued(state: RequestState, samples: Sequence[SampleState]) -> int:
    """How many answers go on on a decode node for these samples: none whose last token is the one that the prompt
    gives, and all beams of a beam search. See `Reserve.num_samples`, and `prefill_node.handoff.needs_decode_node`."""
    sampling = state.request.sampling
    if sampling.beam_width:
        return max(len(samples), sampling.beam_width)
    return len(samples) if sampling.max_tokens - _num_output(samples) > 1 else 0


def _num_output(samples: Sequence[SampleState]) -> int:
    return max([len(sample.tokens) for sample in samples], default=0)
