"""The router's half of the protocol, as a state machine: events and the time go in, actions come out.

No sockets and no clock: the front ends and the node streams carry messages to and from it, and tests race it in every
order. The rules it keeps: tokens and ends count only from the current attempt; a gap in a sample's indexes fails the
attempt; whatever is lost becomes attempt + 1, a Prefill of prompt and output so far; each request ends exactly once,
after all that was accepted of it has been told.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PeerLost,
    RequestCancelled,
)
from baton.messages import (
    Abort,
    Adopted,
    DecodeTarget,
    End,
    HandedOff,
    Load,
    NodeInfo,
    Prefill,
    SampleEnd,
    Started,
    Tokens,
    Update,
    WorkId,
)
from router.life import (
    FirstToken,
    RequestEvent,
    RequestLife,
    RoutedRequest,
    SampleEvent,
    SampleLife,
    SampleOut,
    TokensOut,
    Work,
    WorkState,
)
from router.placement import Placement, Pool

MAX_ATTEMPTS = 4
"""A request that lost this many nodes is more likely the cause than the victim."""


@dataclass(frozen=True, slots=True)
class ToNode:
    incarnation: str
    message: Prefill | Abort


@dataclass(frozen=True, slots=True)
class Emit:
    """For the client of `request_id`: `RequestEnd` comes exactly once, last."""

    request_id: str
    event: RequestEvent


Action = ToNode | Emit


class RouterCore:
    """All live requests of one router. `epoch` names this router's life; `with_prefill`: it has prefill nodes, now or
    later; `first_token`: whether what these sample is told at once, or when the decode node goes on with it."""

    def __init__(self, epoch: int, with_prefill: bool = True, first_token: FirstToken = "prefill") -> None:
        self.epoch = epoch
        self.pool = Pool(with_prefill)
        self._holds = first_token == "decode"
        self._requests: dict[str, RequestLife] = {}
        self._owner: dict[WorkId, RequestLife] = {}
        self._actions: list[Action] = []

    # ---- what the world tells ----

    def node_up(self, info: NodeInfo, now: float) -> None:
        """A node is subscribed: work may be placed there."""
        self.pool.add(info)

    def node_lost(self, incarnation: str, reason: str, now: float) -> None:
        """The node's stream ended or went silent. What depended on it goes to the next attempt."""
        self.pool.remove(incarnation)
        for life in list(self._requests.values()):
            for work in list(life.works.values()):
                if work.id in life.works and work.depends_on(incarnation):  # one failure can end all the request's work
                    self._fail(life, work, NodeUnavailable(f"node {incarnation} lost: {reason}"), now, {incarnation})

    def node_load(self, incarnation: str, load: Load) -> None:
        if node := self.pool.get(incarnation):
            node.load = load

    def why_not_ready(self) -> str | None:
        return self.pool.why_not_ready()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def states(self) -> list[WorkState]:
        """The states of all live work, for metrics."""
        return [work.state for life in self._requests.values() for work in life.works.values()]

    def state_of(self, request_id: str) -> WorkState | None:
        """The least advanced state of the request's live work. None: not live."""
        life = self._requests.get(request_id)
        order = list(WorkState)
        return min((w.state for w in life.works.values()), key=order.index, default=None) if life else None

    # ---- what the client wants ----

    def submit(self, request: RoutedRequest, now: float) -> None:
        """Place a new request. Raises InvalidRequest or NodeUnavailable when it cannot be placed now."""
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        samples = [SampleLife(i) for i in range(request.n)]
        life = RequestLife(request, now, now + request.deadline_s, samples)
        placement = self.pool.choose(life.avoid)
        self._requests[request.request_id] = life
        self._place(life, samples, request.request_id, 0, placement, now)

    def stop_sample(self, request_id: str, sample: int, now: float) -> None:
        """A stop string ended the sample: tokens past it are neither wanted nor counted."""
        life = self._requests.get(request_id)
        if life is None or life.samples[sample].ended:
            return
        life.samples[sample].ended = True
        life.samples[sample].early.clear()
        life.samples[sample].held.clear()
        for work in list(life.works.values()):
            if life.samples[sample] in work.samples:
                if work.unfinished:
                    self._abort(work, (sample,))
                else:
                    self._abort(work)
                    self._retire(life, work)
        self._end_if_done(life, now)

    def cancel(self, request_id: str, now: float) -> None:
        """The client went away."""
        if life := self._requests.get(request_id):
            self._end(life, RequestCancelled("the client went away"), now)

    # ---- time ----

    def next_deadline(self) -> float | None:
        return min((life.deadline for life in self._requests.values()), default=None)

    def tick(self, now: float) -> None:
        for life in list(self._requests.values()):
            if life.deadline <= now:
                error = DeadlineExceeded(f"not finished within {life.request.deadline_s:g} s")
                self._end(life, error, now)

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # ---- what nodes tell ----

    def update(self, incarnation: str, update: Update, now: float) -> None:
        """Take one update of a node. Anything of an attempt that is not current, or of a node that the attempt was not
        placed on, is late and ignored."""
        life = self._owner.get(update.work)
        if life is None:
            return
        work = life.works[update.work]
        if incarnation not in (work.prefill, work.decode):
            return
        match update.kind:
            case Started() as started:
                self._started(life, work, started, incarnation)
            case Tokens() | SampleEnd() as item:
                self._item(life, work, item, incarnation, now)
            case HandedOff() as handed_off:
                if not work.handed_off:
                    self._prefilled(life, work)
                    work.handed_off = True
                    life.timings.handed_off(handed_off)
                    self._after_progress(life, work, now)
            case Adopted() as adopted:
                self._prefilled(life, work)
                work.state = WorkState.DECODING
                for sample in work.samples:
                    self._release(life, sample, now)
                life.timings.adopted(adopted)
            case End(error):
                self._ended(life, work, error, incarnation, now)

    def _started(self, life: RequestLife, work: Work, started: Started, incarnation: str) -> None:
        if work.state is WorkState.QUEUED:
            work.state = WorkState.PREFILLING
        if work.id.attempt == 0 or not life.timings.queue_s:
            life.timings.queue_s = started.queue_s
            life.timings.num_cached_tokens = started.num_cached_tokens

    def _item(self, life: RequestLife, work: Work, item: Tokens | SampleEnd, incarnation: str, now: float) -> None:
        sample = next((s for s in work.samples if s.index == item.sample), None)
        if sample is None:
            self._fail(life, work, InternalError(f"{work.id}: sample {item.sample} was not asked for"), now)
        elif not sample.ended:
            gap = isinstance(item, Tokens) and item.first_index > len(sample.tokens)
            if incarnation == work.decode and not work.handed_off and (sample.early or gap):
                sample.early.append(item)  # it overtook the prefill node's tokens
            elif self._accept(life, work, sample, item, now):
                self._after_progress(life, work, now)

    def _accept(self, life: RequestLife, work: Work, sample: SampleLife, item: Tokens | SampleEnd, now: float) -> bool:
        """Take one item in index order. False: the attempt failed."""
        if isinstance(item, SampleEnd):
            sample.ended = True
            sample.early.clear()
            self._tell(life, work, sample, SampleOut(sample.index, item.reason, item.stop_token_id), now)
            return True
        have = len(sample.tokens)
        if item.first_index > have:
            gap = InternalError(f"{work.id}: sample {sample.index} jumps from token {have} to {item.first_index}")
            self._fail(life, work, gap, now, retry=True)
            return False
        known = have - item.first_index  # a repeat of what we have
        fresh = item.token_ids[known:]
        if fresh:
            self._prefilled(life, work)
            sample.tokens.extend(fresh)
            if work.decode and work.state is not WorkState.DECODING:
                work.state = WorkState.HANDING_OFF
            elif not work.decode:
                work.state = WorkState.DECODING
            self._tell(life, work, sample, TokensOut(sample.index, fresh, item.logprobs[known:]), now)
        return True

    def _after_progress(self, life: RequestLife, work: Work, now: float) -> None:
        """What waited for tokens of the prefill node may count now; after its last word a gap is a gap."""
        for sample in work.samples:
            while sample.early:
                head = sample.early[0]
                if isinstance(head, Tokens) and head.first_index > len(sample.tokens) and not work.handed_off:
                    break
                sample.early.pop(0)
                if not self._accept(life, work, sample, head, now):
                    return
        if work.end_waits and not any(s.early for s in work.samples):
            self._ended(life, work, None, work.decode or work.prefill, now)

    def _ended(self, life: RequestLife, work: Work, error: BatonError | None, incarnation: str, now: float) -> None:
        if error is not None:
            self._fail(life, work, error, now, _suspects(work, error, incarnation))
        elif not work.unfinished:
            if incarnation == work.decode and not work.handed_off:
                self._to_node(work.prefill, Abort(work.id))  # its last word is still under way and says nothing new
            self._retire(life, work)
            self._end_if_done(life, now)
        elif incarnation == work.decode and not work.handed_off:
            work.end_waits = True
        else:
            self._fail(life, work, InternalError(f"{work.id} ended with unfinished samples"), now, retry=True)

    # ---- telling the client ----

    def _tell(self, life: RequestLife, work: Work, sample: SampleLife, event: SampleEvent, now: float) -> None:
        """What a prefill node sampled may have to wait for the decode node; a sample that ended waits for nobody."""
        sample.held.append(event)
        if sample.ended or not (self._holds and work.awaits_decode):
            self._release(life, sample, now)

    def _release(self, life: RequestLife, sample: SampleLife, now: float) -> None:
        if sample.held and not life.told:
            life.told = True
            life.timings.first_token_s = now - life.arrived
        for event in sample.held:
            self._emit(life, event)
        sample.held.clear()

    # ---- placing, failing, ending ----

    def _place(
        self,
        life: RequestLife,
        samples: list[SampleLife],
        key: str,
        attempt: int,
        placement: Placement,
        now: float,
    ) -> None:
        prefill, decode = placement.prefill.info, placement.decode.info if placement.decode else None
        work_id = WorkId(self.epoch, key, attempt)
        work = Work(work_id, samples, prefill.incarnation, decode.incarnation if decode else None)
        life.works[work_id] = work
        self._owner[work_id] = life
        life.timings.num_attempts = max(life.timings.num_attempts, attempt + 1)
        life.timings.prefill_node, life.timings.decode_node = prefill.node_id, (decode or prefill).node_id
        self.pool.place(placement, len(life.request.prompt_tokens))
        target = DecodeTarget(decode.address, decode.incarnation) if decode else None
        self._to_node(work.prefill, life.prefill(work, target, now))

    def _fail(
        self,
        life: RequestLife,
        work: Work,
        error: BatonError,
        now: float,
        suspects: set[str] | None = None,
        retry: bool = False,
    ) -> None:
        """The attempt is lost: fence it, and place what is unfinished again, or end the request with `error`."""
        self._abort(work)
        self._retire(life, work)
        unfinished = work.unfinished
        for sample in work.samples:
            sample.early.clear()
        if not unfinished:
            self._end_if_done(life, now)
            return
        life.avoid |= suspects or set()
        if not (retry or error.retryable) or work.id.attempt + 1 >= MAX_ATTEMPTS:
            self._end(life, error, now)
            return
        try:
            for group in life.groups(unfinished):
                self._place_again(life, work, group, error, now)
        except (NodeUnavailable, Overloaded) as refused:
            self._end(life, error if refused is error else type(refused)(f"{error.message}; {refused.message}"), now)

    def _place_again(
        self, life: RequestLife, lost: Work, group: list[SampleLife], error: BatonError, now: float
    ) -> None:
        """Raises NodeUnavailable; and the error itself where it is Overloaded and there is nobody else to ask, so that
        the client comes again later."""
        placement = self.pool.choose(life.avoid)
        if isinstance(error, Overloaded) and placement.last.info.incarnation in life.avoid:
            raise error
        whole = len(group) == len(lost.samples)
        key = lost.id.request_id if whole else f"{lost.id.request_id}/{group[0].index}"
        self._place(life, group, key, lost.id.attempt + 1, placement, now)

    def _end_if_done(self, life: RequestLife, now: float) -> None:
        if not life.works:
            self._end(life, None, now)

    def _end(self, life: RequestLife, error: BatonError | None, now: float) -> None:
        for work in list(life.works.values()):
            self._abort(work)
            self._retire(life, work)
        if self._requests.pop(life.request.request_id, None):
            for sample in life.samples:
                self._release(life, sample, now)
            self._emit(life, life.end(error, now))

    def _retire(self, life: RequestLife, work: Work) -> None:
        del life.works[work.id]
        del self._owner[work.id]
        self._prefilled(life, work)
        self.pool.ended(work.decode or work.prefill, len(life.request.prompt_tokens))

    def _prefilled(self, life: RequestLife, work: Work) -> None:
        if not work.prefilled:
            work.prefilled = True
            self.pool.prefilled(work.prefill, len(life.request.prompt_tokens))

    def _abort(self, work: Work, samples: tuple[int, ...] = ()) -> None:
        for incarnation in work.nodes():
            self._to_node(incarnation, Abort(work.id, samples))

    def _to_node(self, incarnation: str, message: Prefill | Abort) -> None:
        if self.pool.get(incarnation):
            self._actions.append(ToNode(incarnation, message))

    def _emit(self, life: RequestLife, event: RequestEvent) -> None:
        self._actions.append(Emit(life.request.request_id, event))


def _suspects(work: Work, error: BatonError, speaker: str) -> set[str]:
    """The nodes to keep the next attempt away from. One that lost its peer blames the other; else a decode node speaks
    for itself, and a prefill node for both, since it passes on what it was refused with."""
    both = {work.prefill, work.decode or work.prefill}
    if isinstance(error, PeerLost):
        return both - {speaker} or both
    return {speaker} if speaker == work.decode else both
