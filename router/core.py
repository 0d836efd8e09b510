"""The router's half of the protocol, as a state machine: events and the time go in, actions come out.

It has no sockets and no clock: the front ends and the node streams carry messages to and from it, and tests race it in
every order. It keeps these rules: tokens and ends count only from the current attempt; a gap in a sample's indexes
fails the attempt; if an attempt is lost, the next one is a Prefill of prompt and output so far; a request that no node
can take at the moment waits for one; each request ends exactly once, after its client got everything accepted so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random

from baton.deadlines import Deadlines
from baton.errors import (
    BatonError,
    InternalError,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PeerLost,
    RequestCancelled,
    TransferError,
)
from baton.messages import (
    Adopted,
    End,
    HandedOff,
    KvEvents,
    Load,
    NodeInfo,
    SampleEnd,
    Started,
    Stayed,
    Tokens,
    Update,
)
from baton.prompt_logprobs import PromptLogprobs
from baton.telemetry.timeline import Timeline
from router.actions import Action, Outbox
from router.attempts import Attempts
from router.kv_flows import KvFlows
from router.life import (
    Attempt,
    AttemptState,
    FirstToken,
    RequestLife,
    RoutedRequest,
    SampleEvent,
    SampleLife,
    SampleOut,
    TokensOut,
    Unplaced,
)
from router.migrations import Migrations
from router.policies import Policy
from router.pool import Pool
from router.prefix_index import PrefixIndex
from router.rebalancing import Rebalancing
from router.retry_budget import RetryBudget
from router.waiting import WaitingRoom

MAX_ATTEMPTS = 4
MAX_LOST_NODES = 2
"""A request that lost this many nodes is more likely the cause than the victim."""


class RouterCore:
    """All live requests of one router, as their clients see them; `attempts` has them as the nodes do.

    `epoch` names this router's life; `with_prefill`: it has prefill nodes, now or later; `first_token`: whether what
    these sample is told at once, or when the decode node goes on with it; `max_waiting`: how many requests, or single
    samples of them, may wait for a node; `policy`: which nodes get what, by default the least loaded; `draw`: what it
    draws from; `migrate_above`: see Rebalancing; `max_waiting_tokens`: see WaitingRoom.
    """

    def __init__(
        self,
        epoch: int,
        with_prefill: bool = True,
        first_token: FirstToken = "prefill",
        max_waiting: int = 1024,
        policy: Policy | None = None,
        draw: Random | None = None,
        migrate_above: float | None = None,
        max_waiting_tokens: int = 0,
    ) -> None:
        self.pool = Pool(with_prefill, policy, draw)
        self.prefix_index = PrefixIndex()
        self.kv_flows = KvFlows()
        self._holds = first_token == "decode"
        self._requests: dict[str, RequestLife] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._retries = RetryBudget()
        self._outbox = Outbox()
        self.take_actions: Callable[[], list[Action]] = self._outbox.take
        """All that are to be carried out since the last call, in order."""
        waiting = WaitingRoom(max_waiting, max_waiting_tokens)
        self._attempts = Attempts(epoch, self.pool, self.prefix_index, self._outbox, waiting)
        self._migrations = Migrations(self.pool, self._attempts, self._outbox)
        self._rebalancing = Rebalancing(self.pool, self._attempts, self._migrations, migrate_above)

    # ---- what the world tells ----

    def node_up(self, info: NodeInfo, now: float) -> None:
        """A node is subscribed: work may be placed there, beginning with requests that wait for a node. If it had been
        lost, its link or its silence was the cause, and no request that it ran."""
        self.pool.add(info)
        self.prefix_index.add(info.incarnation, info.num_blocks)
        for life in self._requests.values():
            life.acquit(info.incarnation)
        self._place_waiting(now)

    def _place_waiting(self, now: float) -> None:
        for life, gone in self._attempts.place_waiting(now):
            self._end(life, gone, now)

    def node_lost(self, incarnation: str, reason: str, now: float) -> None:
        """The node's stream ended or went silent. Attempts that depended on the node are lost."""
        node = self.pool.get(incarnation)
        stopped = node is not None and not node.takes_work  # nobody's fault
        if not stopped:
            self.pool.failed(incarnation, reason, now)
        self.pool.remove(incarnation)
        self.prefix_index.forget(incarnation)
        self._migrations.target_lost(incarnation)
        self._rebalancing.forget(incarnation)
        what = f"{node.info.role.value} node {node.info.node_id}" if node else f"node {incarnation}"
        for life in list(self._requests.values()):
            attempts = [attempt for attempt in life.attempts.values() if attempt.depends_on(incarnation)]
            if not stopped and (attempts or incarnation in life.blamed):
                life.lost[incarnation] = f"{what}: {reason}"
            for attempt in attempts:
                if attempt.id in life.attempts:  # one failure can end all the request's work
                    self._fail(life, attempt, NodeUnavailable(f"{what} lost: {reason}"), now, {incarnation}, lost=True)

    def node_load(self, incarnation: str, load: Load, now: float) -> None:
        self.pool.told(incarnation, load)
        if self._attempts.num_waiting:
            self._place_waiting(now)
        self._empty_if_leaving(incarnation, now)
        self._rebalancing.loaded(incarnation, now)

    def drain_node(self, incarnation: str, drains: bool, now: float) -> None:
        """Place nothing more on the node, or place work there again. What it has goes on, if it can on other nodes."""
        if node := self.pool.get(incarnation):
            node.drains = drains
            self._empty_if_leaving(incarnation, now)

    def _empty_if_leaving(self, incarnation: str, now: float) -> None:
        node = self.pool.get(incarnation)
        if node is not None and not node.takes_work:
            self._migrations.empty(incarnation, now)

    def is_on(self, incarnation: str) -> bool:
        """Whether a request still needs that node."""
        return self._attempts.is_on(incarnation)

    def node_blocks(self, incarnation: str, events: KvEvents) -> None:
        """Raises InvalidRequest if events are missing before these: the node's session must end."""
        self.prefix_index.apply(incarnation, events)

    def why_not_ready(self) -> str | None:
        return self.pool.why_not_ready()

    def why_degraded(self, now: float) -> str | None:
        return self.pool.why_degraded(now)

    def nodes(self) -> list[NodeInfo]:
        """All that are subscribed."""
        return self.pool.infos()

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def num_placements(self) -> dict[str, int]:
        """By what was decided, since the start: `Placement.kind`, or that an attempt waited for a node."""
        return dict(self._attempts.num_placements)

    def num_migrations(self) -> dict[str, int]:
        """By outcome, since the start: see Migrations."""
        return dict(self._migrations.num_by_outcome)

    def live_timelines(self, number: int, now: float) -> list[Timeline]:
        """Of so many live requests, the newest first."""
        newest = itertools.islice(reversed(self._requests.values()), number)
        return [life.timeline(None, now, is_live=True) for life in newest]

    def live_timelines_of(self, client_id: str, now: float) -> list[Timeline]:
        """Of the live requests of a client's request, or of one of them, by its own id."""
        found = [life for name, life in self._requests.items() if client_id in (name, name.rpartition(".")[0])]
        return [life.timeline(None, now, is_live=True) for life in found]

    def states(self) -> list[AttemptState]:
        """The states of all live work, for metrics."""
        return self._attempts.states()

    # ---- what the client wants ----

    def submit(self, request: RoutedRequest, now: float, submitted: float | None = None) -> None:
        """Place a new request, or have it wait for a node. Its time counts from `now`, when it was received;
        `submitted`: when what came before this call was done; None: at once. Raises InvalidRequest; Overloaded;
        NodeUnavailable when the present nodes do not fit together, or when too many requests wait already."""
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        samples = [SampleLife(i) for i in range(request.n)]
        life = RequestLife(request, now, now + request.deadline_s, samples)
        life.record.submitted_at_s = max(0.0, submitted - now) if submitted is not None else 0.0
        placement = self._attempts.choose(life, now)
        self._attempts.place_or_wait(Unplaced(life, samples, request.request_id, 0), placement, now)
        self._requests[request.request_id] = life
        self._retries.request(now)
        self._deadlines.set(request.request_id, life.deadline)

    def stop_sample(self, request_id: str, sample: int, now: float) -> None:
        """A stop string ended the sample: tokens after it are neither delivered nor counted."""
        life = self._requests.get(request_id)
        if life is None or life.samples[sample].ended:
            return
        life.samples[sample].ended = True
        life.samples[sample].early.clear()
        life.samples[sample].held.clear()
        for attempt in list(life.attempts.values()):
            if life.samples[sample] in attempt.samples:
                if attempt.unfinished:
                    self._attempts.abort(attempt, (sample,))
                else:
                    self._attempts.abort(attempt)
                    self._attempts.retire(life, attempt, now)
        for waiting in [w for w in life.unplaced if all(s.ended for s in w.samples)]:
            self._attempts.stop_waiting(waiting)
        self._end_if_done(life, now)

    def cancel(self, request_id: str, now: float) -> None:
        """The client went away."""
        if life := self._requests.get(request_id):
            self._end(life, RequestCancelled("the client went away"), now)

    def stop(self, now: float) -> None:
        """End all live requests: the router stops."""
        for life in list(self._requests.values()):
            self._end(life, NodeUnavailable("the server was stopped before the request had finished"), now)

    # ---- time ----

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def tick(self, now: float) -> None:
        for request_id in self._deadlines.due(now):
            life = self._requests[request_id]
            self._end(life, life.overdue(self.pool.why_not_ready(life.version)), now)

    # ---- what nodes tell ----

    def update(self, incarnation: str, update: Update, now: float) -> None:
        """Take one update of a node. Anything of an attempt that is not current, or of a node that the attempt was not
        placed on, is late and ignored."""
        found = self._attempts.find(update.attempt_id, incarnation)
        if found is None:
            return
        life, attempt = found
        if attempt.target is not None and not self._moves_on(life, attempt, update, incarnation, now):
            return
        if isinstance(update.kind, Tokens):
            self.pool.generated(incarnation, len(update.kind.token_ids))
        match update.kind:
            case Tokens() as tokens if self._flows(life, attempt, tokens):
                self._outbox.to_client(
                    life.request.request_id, TokensOut(tokens.sample, tokens.token_ids, tokens.logprobs)
                )
            case Tokens() | SampleEnd() as item:
                self._item(life, attempt, item, incarnation, now)
            case Started() as started:
                attempt.record.started(started, now - life.arrived)
                self._started(life, attempt, started, incarnation)
            case PromptLogprobs() as piece:
                self._prompt_logprobs(life, attempt, piece, now)
            case HandedOff() as handed_off:
                if not attempt.handed_off and incarnation == attempt.prefill:
                    self._handed_off(life, attempt, handed_off, now)
            case Adopted() as adopted:
                self._adopted(life, attempt, adopted, incarnation, now)
            case Stayed() as stayed:
                self._migrations.stayed(life, attempt, stayed, now)
            case End(error) as end:
                attempt.record.ended(end)
                self._ended(life, attempt, error, incarnation, now)

    def _moves_on(self, life: RequestLife, attempt: Attempt, update: Update, incarnation: str, now: float) -> bool:
        """Note it if an update of an attempt that is to move says that the target has it. False: it is lost there."""
        kind, target = update.kind, attempt.target
        if incarnation != target and not (isinstance(kind, HandedOff) and incarnation == attempt.generates_on):
            if isinstance(kind, End) and kind.error is not None:
                self._migrations.num_by_outcome["lost"] += 1
            return True
        if attempt.target_lost:
            error = NodeUnavailable("the decode node was lost to which the request has moved")
            self._migrations.num_by_outcome["lost"] += 1
            self._fail(life, attempt, error, now, {target} if target else None, lost=True)
            return False
        self._migrations.handed_over(life, attempt)
        attempt.record.moved(life.timings.decode_node, now - life.arrived)
        return True

    def _handed_off(self, life: RequestLife, attempt: Attempt, handed_off: HandedOff, now: float) -> None:
        self._attempts.prefilled(life, attempt, now)
        attempt.handed_off = True
        if attempt.decode and not attempt.visited:
            self.pool.pair_breakers.worked((attempt.prefill, attempt.decode))
        self.pool.worked(attempt.prefill)
        if not attempt.visited:
            life.timings.handed_off(handed_off)
            attempt.record.handed_off(handed_off, now - life.arrived)
        self._after_progress(life, attempt, now)

    def _adopted(self, life: RequestLife, attempt: Attempt, adopted: Adopted, incarnation: str, now: float) -> None:
        self._attempts.prefilled(life, attempt, now)
        attempt.state = AttemptState.DECODING
        if not attempt.visited:
            attempt.record.adopted(adopted, now - life.arrived)
        self._attempts.has_blocks(attempt)
        for sample in attempt.samples:
            self._release(life, sample, now)
        self.pool.worked(incarnation)
        self.kv_flows.add(attempt.prefill, incarnation, adopted.transfer_bytes)
        if not attempt.visited:
            life.timings.adopted(adopted)
            self.pool.handed_over(incarnation, adopted.handoff_s)

    def _flows(self, life: RequestLife, attempt: Attempt, item: Tokens) -> bool:
        """Take the next tokens of a sample in full flow, as nearly all updates are. False: it may be otherwise, and
        `_item` has to look."""
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
            or not life.told
            or life.lacks_prompt_logprobs
        ):
            return False
        sample.tokens.extend(item.token_ids)
        return True

    def _started(self, life: RequestLife, attempt: Attempt, started: Started, incarnation: str) -> None:
        if attempt.state is AttemptState.QUEUED:
            attempt.state = AttemptState.PREFILLING
        if attempt.decode is None:
            self._attempts.has_blocks(attempt)
        if attempt.id.attempt == 0:  # later ones compute output, too
            attempt.num_cached = started.num_cached_tokens
        if attempt.id.attempt == 0 or not life.timings.queue_s:
            life.timings.queue_s = started.queue_s
            life.timings.num_cached_tokens = started.num_cached_tokens

    def _prompt_logprobs(self, life: RequestLife, attempt: Attempt, piece: PromptLogprobs, now: float) -> None:
        """Pass on what is new; an attempt repeats what an earlier one told."""
        try:
            fresh = life.take_prompt_logprobs(piece)
        except InternalError as error:
            self._fail(life, attempt, error, now, retry=True)
            return
        if fresh is not None:
            self._outbox.to_client(life.request.request_id, fresh)

    def _item(
        self, life: RequestLife, attempt: Attempt, item: Tokens | SampleEnd, incarnation: str, now: float
    ) -> None:
        sample = attempt.sample(item.sample)
        if sample is None:
            self._fail(life, attempt, InternalError(f"{attempt.id}: sample {item.sample} was not asked for"), now)
        elif not sample.ended:
            gap = isinstance(item, Tokens) and item.first_index > len(sample.tokens)
            if (
                incarnation == attempt.decode
                and not attempt.handed_off
                and (sample.early or gap or life.lacks_prompt_logprobs)
            ):
                sample.early.append(item)  # it overtook the prefill node's tokens
            elif self._accept(life, attempt, sample, item, now):
                self._after_progress(life, attempt, now)

    def _accept(
        self, life: RequestLife, attempt: Attempt, sample: SampleLife, item: Tokens | SampleEnd, now: float
    ) -> bool:
        """Take one item in index order. False: the attempt failed."""
        if life.lacks_prompt_logprobs:
            lacking = InternalError(f"{attempt.id}: sample {sample.index} came before all logprobs of the prompt")
            self._fail(life, attempt, lacking, now, retry=True)
            return False
        if isinstance(item, SampleEnd):
            sample.ended = True
            sample.early.clear()
            self._tell(life, attempt, sample, SampleOut(sample.index, item.reason, item.stop_token_id), now)
            return True
        have = len(sample.tokens)
        if item.first_index > have:
            gap = InternalError(f"{attempt.id}: sample {sample.index} jumps from token {have} to {item.first_index}")
            self._fail(life, attempt, gap, now, retry=True)
            return False
        known = have - item.first_index  # repeated tokens
        fresh = item.token_ids[known:]
        if fresh:
            self._attempts.prefilled(life, attempt, now)
            sample.tokens.extend(fresh)
            if attempt.decode and attempt.state is not AttemptState.DECODING:
                attempt.state = AttemptState.HANDING_OFF
            elif not attempt.decode:
                attempt.state = AttemptState.DECODING
                self.pool.worked(attempt.prefill)
            self._tell(life, attempt, sample, TokensOut(sample.index, fresh, item.logprobs[known:]), now)
        return True

    def _after_progress(self, life: RequestLife, attempt: Attempt, now: float) -> None:
        """Take items that waited for tokens of the prefill node. After its last message, a gap is an error."""
        for sample in attempt.samples:
            while sample.early:
                head = sample.early[0]
                if isinstance(head, Tokens) and head.first_index > len(sample.tokens) and not attempt.handed_off:
                    break
                sample.early.pop(0)
                if not self._accept(life, attempt, sample, head, now):
                    return
        if attempt.end_waits and not any(s.early for s in attempt.samples):
            self._ended(life, attempt, None, attempt.decode or attempt.prefill, now)

    def _ended(
        self, life: RequestLife, attempt: Attempt, error: BatonError | None, incarnation: str, now: float
    ) -> None:
        if error is not None:
            suspects = attempt.suspects(error, incarnation)
            if isinstance(error, PeerLost):
                life.blamed |= suspects
            if isinstance(error, TransferError) and attempt.decode:
                self.pool.pair_breakers.failed((attempt.prefill, attempt.decode), error.message, now)
            if isinstance(error, InternalError):
                for suspect in suspects:
                    self.pool.failed(suspect, error.message, now)
            self._fail(life, attempt, error, now, suspects, lost=isinstance(error, PeerLost))
        elif not attempt.unfinished:
            if incarnation == attempt.decode and not attempt.handed_off:
                # its last word is still under way and says nothing new
                self._attempts.abort_on(attempt.prefill, attempt)
            self._attempts.retire(life, attempt, now)
            self._end_if_done(life, now)
        elif incarnation == attempt.decode and not attempt.handed_off:
            attempt.end_waits = True
        else:
            self._fail(life, attempt, InternalError(f"{attempt.id} ended with unfinished samples"), now, retry=True)

    # ---- telling the client ----

    def _tell(self, life: RequestLife, attempt: Attempt, sample: SampleLife, event: SampleEvent, now: float) -> None:
        """Emit the event, or hold it back until the decode node goes on. A sample that ended waits for nothing."""
        sample.held.append(event)
        if sample.ended or not (self._holds and attempt.awaits_decode):
            self._release(life, sample, now)

    def _release(self, life: RequestLife, sample: SampleLife, now: float) -> None:
        if sample.held and not life.told:
            life.has_first_token(sample, self._holds, now)
        for event in sample.held:
            self._outbox.to_client(life.request.request_id, event)
        sample.held.clear()

    # ---- failing, ending ----

    def _fail(
        self,
        life: RequestLife,
        attempt: Attempt,
        error: BatonError,
        now: float,
        suspects: set[str] | None = None,
        retry: bool = False,
        lost: bool = False,
    ) -> None:
        """The attempt is lost: fence it, and place what is unfinished again, or end the request with `error`. `lost`: a
        node is, which needs no share of the retry budget."""
        attempt.record.failed(error)
        self._attempts.abort(attempt)
        self._attempts.retire(life, attempt, now)
        unfinished = attempt.unfinished
        for sample in attempt.samples:
            sample.early.clear()
        if not unfinished:
            self._end_if_done(life, now)
            return
        life.avoid |= suspects or set()
        if life.is_poisonous(MAX_LOST_NODES):
            error, retry = InternalError(f"given up, since nodes were lost that ran it: {life.losses}"), False
        if not (retry or error.retryable) or attempt.id.attempt + 1 >= MAX_ATTEMPTS:
            self._end(life, error, now)
            return
        if not (lost or self._retries.take(now)):
            self._end(life, type(error)(f"{error.message}; not tried again, since too many requests are"), now)
            return
        try:
            for group in life.groups(unfinished):
                self._place_again(life, attempt, group, error, now)
        except (NodeUnavailable, Overloaded) as refused:
            self._end(life, error if refused is error else type(refused)(f"{error.message}; {refused.message}"), now)

    def _place_again(
        self, life: RequestLife, lost: Attempt, group: list[SampleLife], error: BatonError, now: float
    ) -> None:
        """Raises NodeUnavailable. Raises `error` itself if it is Overloaded and no other node can be asked, so that the
        client retries later."""
        placement = self._attempts.choose(life, now)
        if isinstance(error, Overloaded) and (placement is None or placement.last.info.incarnation in life.avoid):
            raise error
        whole = len(group) == len(lost.samples)
        key = lost.id.request_id if whole else f"{lost.id.request_id}/{group[0].index}"
        self._attempts.place_or_wait(Unplaced(life, group, key, lost.id.attempt + 1, error), placement, now)

    def _end_if_done(self, life: RequestLife, now: float) -> None:
        if not life.attempts and not life.unplaced:
            self._end(life, None, now)

    def _end(self, life: RequestLife, error: BatonError | None, now: float) -> None:
        for attempt in list(life.attempts.values()):
            self._attempts.abort(attempt)
            self._attempts.retire(life, attempt, now)
        for task in list(life.unplaced):
            self._attempts.stop_waiting(task)
        self._deadlines.discard(life.request.request_id)
        if self._requests.pop(life.request.request_id, None):
            for sample in life.samples:
                self._release(life, sample, now)
            self._outbox.to_client(life.request.request_id, life.end(error, now))
