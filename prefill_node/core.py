"""The prefill node as a state machine: prompts in, KV parts and first tokens out.

Its loop is `prepare` and `compute`: take what the network and the device did, end what is overdue, send what is ready,
decide a step; launch it. Neither waits: a step's end, or that of a group of its layers, makes a turn like an event.
Decode memory is asked for when a prompt's first chunk is scheduled (so a queue here holds nothing there), and is
granted while that chunk is computed; parts leave as their blocks are computed and D has slots (`parts_out`); the first
token leaves once D has granted; the Commit makes the request D's.
"""

from __future__ import annotations

from dataclasses import replace

from baton.audit import KvAudit
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PeerLost,
    RequestCancelled,
    TransferError,
)
from baton.messages import (
    Abort,
    Commit,
    CommitReply,
    Credit,
    DecodeTarget,
    End,
    Grant,
    HandedOff,
    Load,
    NodeRole,
    Prefill,
    PrefillToDecode,
    Refuse,
    Release,
    Reserve,
    Sample,
    SampleEnd,
    Started,
    Tokens,
    Update,
    UpdateKind,
    WorkId,
)
from engine.engine import Engine, Plan
from engine.holdings import Holding
from engine.node.audit import make_audit, verdict
from engine.node.events import (
    ClosePeer,
    Draining,
    Event,
    FromPeer,
    FromRouter,
    Output,
    PeerClosed,
    PeerOpened,
    SessionLost,
    SessionOpened,
    ToDecode,
    ToRouter,
)
from engine.node.fences import Fences
from engine.node.intake import make_sequence
from engine.sequence import Sequence
from engine.step import SampledToken, StepResult
from kv_transfer.sender import KvSender, PartFailed, PartSent
from kv_transfer.sender import PeerLost as PeerGone
from prefill_node.handoff import DecodePeer, Drain, Handoff, HandoffState
from prefill_node.parts_out import PartsOut


class PrefillCore:
    """Owned by the engine's thread, and owner of engine and sender. `max_waiting` prompts may queue; `keep_s` is for
    how long tombstones are kept: longer than the longest deadline. `layer_groups`, `whole_tokens`: see PartsOut."""

    def __init__(
        self,
        engine: Engine,
        sender: KvSender,
        *,
        incarnation: str,
        max_waiting: int = 4096,
        keep_s: float = 7200.0,
        layer_groups: int = 1,
        whole_tokens: int = 0,
    ) -> None:
        self.engine = engine
        self.sender = sender
        self._incarnation = incarnation
        self._max_waiting = max_waiting
        self._parts = PartsOut(engine, sender, layer_groups, whole_tokens)
        self._fences = Fences(keep_s)
        self._epochs: set[int] = set()
        self._handoffs: dict[WorkId, Handoff] = {}
        self._peers: dict[str, DecodePeer] = {}
        self._outputs: list[Output] = []
        self._stopping = False
        self._plan = Plan()

    # ---- the loop ----

    def prepare(self, now: float) -> None:
        self.engine.blocks.now = now
        self._take_transfers(now)
        self._end_overdue(now)
        if not self.engine.has_room:
            self._take_results(self.engine.compute(Plan(), wait=False))
        self._move_on(now)
        self._plan = self.engine.schedule(now)
        for sequence in self._plan.started:
            self._started(self._handoffs[sequence.work], sequence, now)

    def compute(self, now: float) -> bool:
        result = self.engine.compute(self._plan, wait=False)
        self._take_results(result)
        self._move_on(now)
        return result.again

    @property
    def device_busy_since(self) -> float | None:
        return self.engine.device_busy_since

    def _take_results(self, result: StepResult) -> None:
        for token in result.sampled:
            self._sampled(self._handoffs[token.sequence.work], token)

    def _move_on(self, now: float) -> None:
        """Whatever an event or a step has made possible."""
        for handoff in list(self._handoffs.values()):
            self._parts.send(handoff)
            self._advance(handoff, now)
        for incarnation, peer in self._peers.items():
            self._parts.drain(incarnation, peer)

    def _take_transfers(self, now: float) -> None:
        for event in self.sender.poll():
            match event:
                case PartSent(peer, lease, _, flight_s):
                    if (known := self._peers.get(peer)) and (handoff := known.leases.get(lease)):
                        handoff.part_sent(now, flight_s)
                case PartFailed(peer, lease, part, reason):
                    self._part_failed(peer, lease, PeerLost(f"part {part} did not reach {peer}: {reason}"), now)
                case PeerGone(peer, reason):
                    if peer in self._peers:
                        self._peers[peer].lost = True
                        self._fail_peer(peer, reason, now)
                    self._outputs.append(ClosePeer(peer, reason))

    def _part_failed(self, peer: str, lease: int, error: PeerLost, now: float) -> None:
        known = self._peers.get(peer)
        if known is None or not known.first_lease or lease < known.first_lease:
            return  # its stream is down, and everything with it has failed already
        if handoff := known.leases.get(lease):
            self._fail(handoff, error, now)
        else:
            # The request is the decode node's, which may wait for this part for ever: have it see a broken stream.
            self._outputs.append(ClosePeer(peer, error.message))

    def _end_overdue(self, now: float) -> None:
        for handoff in [h for h in self._handoffs.values() if h.deadline <= now]:
            self._fail(handoff, DeadlineExceeded(f"not handed off within {handoff.message.deadline_s:g} s"), now)
        self._fences.expire(now)

    # ---- events in ----

    def handle(self, event: Event, now: float) -> None:
        self.engine.blocks.now = now
        match event:
            case SessionOpened(epoch):
                self._epochs.add(epoch)
            case SessionLost(epoch):
                self._epochs.discard(epoch)
                for handoff in [h for h in self._handoffs.values() if h.epoch == epoch]:
                    self._fail(handoff, RequestCancelled("the router's stream ended"), now)
            case FromRouter(epoch, Prefill() as prefill):
                self._intake(epoch, prefill, now)
            case FromRouter(_, Abort() as abort):
                self._abort(abort, now)
            case PeerOpened(peer, part_blocks):
                self._parts.part_blocks[peer] = part_blocks
            case PeerClosed(peer, reason):
                self._parts.part_blocks.pop(peer, None)
                if peer in self._peers:
                    self._fail_peer(peer, reason, now)
                    del self._peers[peer]
            case FromPeer(peer, message):
                if peer in self._peers:
                    self._from_decode(self._peers[peer], message, now)
            case Draining():
                self._stopping = True

    def _intake(self, epoch: int, prefill: Prefill, now: float) -> None:
        work = prefill.work
        if epoch not in self._epochs or not self._fences.admit(work, now):
            return  # a repeat, or fenced: whoever sent it has its answer or wants none
        for older in [h for w, h in self._handoffs.items() if w.key == work.key]:
            self._fail(older, RequestCancelled(f"attempt {work.attempt} took its place"), now)
        try:
            self._check(prefill)
            sequence = make_sequence(prefill, hand_off=True, now=now)
            self.engine.add(sequence)
        except BatonError as error:
            self._to_router(epoch, work, End(error))
            return
        self._handoffs[work] = Handoff(prefill, epoch, sequence, now, now + prefill.deadline_s)

    def _check(self, prefill: Prefill) -> None:
        if prefill.target_incarnation != self._incarnation:
            raise NodeUnavailable(f"this is incarnation {self._incarnation}, not {prefill.target_incarnation}")
        if self._stopping:
            raise NodeUnavailable("this node is stopping")
        if self.engine.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} prompts are waiting")
        if prefill.decode is None and self._remaining(prefill) > 1:
            raise InvalidRequest("a prefill node needs a decode node for more than one token", "decode")
        if prefill.decode and (peer := self._peers.get(prefill.decode.incarnation)) and peer.lost:
            raise PeerLost(f"decode node {prefill.decode.incarnation} is being disconnected")

    def _abort(self, abort: Abort, now: float) -> None:
        if abort.samples:
            return  # the decode node drops them: what is done here, the prompt, is the same without
        work = abort.work
        self._fences.fence(work, now)
        for handoff in [h for w, h in self._handoffs.items() if w.key == work.key and w.attempt <= work.attempt]:
            self._fail(handoff, RequestCancelled("aborted by the router"), now)

    # ---- what the decode node says ----

    def _from_decode(self, peer: DecodePeer, message: object, now: float) -> None:
        match message:
            case Grant() as grant:
                self._granted(peer, grant, now)
            case Credit(lease, credits):
                if handoff := peer.leases.get(lease):
                    handoff.credits = max(handoff.credits, credits)
                elif drain := peer.drains.get(lease):
                    drain.credits = max(drain.credits, credits)
            case Refuse(work, error):
                if (handoff := self._handoffs.get(work)) and handoff.target == peer.target:
                    self._fail(handoff, error, now)
                for drain in peer.drains.values():
                    drain.closed |= drain.work == work
            case CommitReply(lease, _, error):
                if handoff := peer.leases.get(lease):
                    if error:
                        self._fail(handoff, error, now)
                    else:
                        handoff.accepted = True

    def _granted(self, peer: DecodePeer, grant: Grant, now: float) -> None:
        if grant.lease <= peer.last_lease:
            return  # a repeat
        peer.last_lease = grant.lease
        peer.first_lease = peer.first_lease or grant.lease
        handoff = self._handoffs.get(grant.work)
        if handoff is None or handoff.target != peer.target:
            peer.drains[grant.lease] = Drain(grant.work, 0, grant.credits)  # it ended while the grant was under way
            self._to_decode(peer.target, Release(grant.lease, grant.work))
            return
        handoff.grant, handoff.credits = grant, grant.credits
        handoff.parts = self._parts.plan(handoff, grant)
        peer.leases[grant.lease] = handoff
        if len(handoff.parts) != grant.num_parts:
            text = f"{peer.target.incarnation} expects {grant.num_parts} parts, and they are {len(handoff.parts)}"
            self._fail(handoff, TransferError(text), now)

    # ---- what the engine did ----

    def _started(self, handoff: Handoff, sequence: Sequence, now: float) -> None:
        handoff.started = now
        started = Started(sequence.num_cached_tokens, now - handoff.received)
        self._to_router(handoff.epoch, sequence.work, started)
        prefill = handoff.message
        if prefill.decode is None or self._remaining(prefill) <= 1:
            return
        block_size = self.engine.config.block_size
        handoff.grouped_from_block, handoff.layer_groups = self._parts.tail(sequence)
        reserve = Reserve(
            work=prefill.work,
            target_incarnation=prefill.decode.incarnation,
            num_tokens=sequence.num_tokens,
            block_hashes=tuple(sequence.block_hashes(sequence.num_tokens // block_size, block_size)),
            num_samples=len(prefill.samples),
            deadline_s=handoff.deadline - now,
            max_total_tokens=len(prefill.prompt_tokens) + prefill.sampling.max_tokens,
            grouped_from_block=handoff.grouped_from_block,
            layer_groups=handoff.layer_groups,
        )
        self._peers.setdefault(prefill.decode.incarnation, DecodePeer(prefill.decode))
        handoff.reserved = True
        self._to_decode(prefill.decode, reserve)

    def _sampled(self, handoff: Handoff, token: SampledToken) -> None:
        logprobs = (token.logprobs,) if token.logprobs else ()
        handoff.results.append(Tokens(token.sample, token.index, (token.token,), logprobs))
        if token.finish:
            handoff.results.append(SampleEnd(token.sample, token.finish, token.stop_token_id))
        handoff.computed = self.engine.clock()  # on a CPU the turn that began at `now` has computed it
        handoff.prefill_s = handoff.computed - handoff.started

    # ---- moving on ----

    def _advance(self, handoff: Handoff, now: float) -> None:
        if handoff.state is HandoffState.COMPUTING and handoff.computed is not None:
            if not handoff.outputs:  # every sample ended with its first token
                self._tell_results(handoff)
                self._finish(handoff, End(), now)
            elif handoff.grant and handoff.target:
                self._tell_results(handoff)
                self._to_decode(handoff.target, self._commit(handoff, handoff.grant, now))
                handoff.state = HandoffState.SENDING
        if handoff.state is HandoffState.SENDING and handoff.all_gathered:
            self.engine.release(handoff.sequence)
            if handoff.accepted and handoff.all_sent:
                self._finish(handoff, handoff.handed_off(), now)

    def _tell_results(self, handoff: Handoff) -> None:
        for result in handoff.results:
            self._to_router(handoff.epoch, handoff.message.work, result)

    def _commit(self, handoff: Handoff, grant: Grant, now: float) -> Commit:
        prefill = handoff.message
        assert handoff.computed is not None
        return Commit(
            lease=grant.lease,
            work=prefill.work,
            target_incarnation=prefill.decode.incarnation if prefill.decode else "",
            prompt_tokens=prefill.prompt_tokens,
            samples=tuple(Sample(index, tokens) for index, tokens in handoff.outputs.items()),
            sampling=prefill.sampling,
            deadline_s=handoff.deadline - now,
            cache_salt=prefill.cache_salt,
            age_s=self.engine.clock() - handoff.computed,
        )

    # ---- ends ----

    def _finish(self, handoff: Handoff, last_word: End | HandedOff, now: float) -> None:
        """The one exit of a handoff: frees its blocks, and tells the router."""
        del self._handoffs[handoff.message.work]
        self.engine.release(handoff.sequence)
        self._to_router(handoff.epoch, handoff.message.work, last_word)
        if handoff.target and (peer := self._peers.get(handoff.target.incarnation)):
            grant = handoff.grant
            if grant and peer.leases.pop(grant.lease, None) and not handoff.all_gathered:
                peer.drains[grant.lease] = Drain(grant.work, handoff.next_part, handoff.credits)
            if isinstance(last_word, End) and handoff.reserved:
                self._to_decode(handoff.target, Release(grant.lease if grant else 0, handoff.message.work))

    def _fail(self, handoff: Handoff, error: BatonError, now: float) -> None:
        if handoff.message.work in self._handoffs:
            self._finish(handoff, End(error), now)

    def _fail_peer(self, incarnation: str, reason: str, now: float) -> None:
        target = self._peers[incarnation].target
        for handoff in [h for h in self._handoffs.values() if h.reserved and h.target == target]:
            self._fail(handoff, PeerLost(f"decode node {incarnation}: {reason}"), now)

    # ---- what the shell asks ----

    def next_deadline(self) -> float | None:
        return min((h.deadline for h in self._handoffs.values()), default=None)

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def load(self) -> Load:
        blocks = self.engine.blocks
        return Load(
            self.engine.num_waiting, len(self._handoffs) - self.engine.num_waiting, blocks.num_free + blocks.num_cached,
            blocks.num_total,
        )  # fmt: skip

    @property
    def idle(self) -> bool:
        """Nothing is here, and no decode node waits for parts of a dead lease."""
        return not self._handoffs and not any(peer.drains for peer in self._peers.values())

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, slots and handoffs disagree. For tests and the audit."""
        self.engine.check_integrity()
        self.sender.check_integrity()
        for incarnation, peer in self._peers.items():
            for lease, handoff in peer.leases.items():
                assert self._handoffs[handoff.message.work] is handoff
                assert handoff.grant
                assert handoff.grant.lease == lease
                assert peer.target.incarnation == incarnation

    def audit(self, now: float) -> KvAudit:
        return make_audit(
            role=NodeRole.PREFILL,
            incarnation=self._incarnation,
            integrity=verdict(self.check_integrity),
            idle=self.idle,
            blocks=self.engine.blocks,
            holdings=[self._with_lease(holding) for holding in self.engine.holdings()],
            slots=self.sender.slots(),
            now=now,
        )

    def _with_lease(self, holding: Holding) -> Holding:
        """The same, with the lease on the decode node that the blocks are for, where there is one."""
        handoff = self._handoffs.get(holding.work)
        if handoff is None or handoff.target is None:
            return holding
        lease = handoff.grant.lease if handoff.grant else 0
        return replace(holding, lease=lease, peer=handoff.target.incarnation)

    def _remaining(self, prefill: Prefill) -> int:
        return prefill.sampling.max_tokens - len(prefill.samples[0].output_tokens) if prefill.samples else 0

    def _to_router(self, epoch: int, work: WorkId, kind: UpdateKind) -> None:
        if epoch in self._epochs:
            self._outputs.append(ToRouter(epoch, Update(work, kind)))

    def _to_decode(self, target: DecodeTarget, message: PrefillToDecode) -> None:
        self._outputs.append(ToDecode(target, message))
