"""One process of the raced cluster: a prefill or decode node, whole but for its shell.

State machine, engine, block manager, sender and receiver are the real ones; the model is `FakeModel`, a device that
computes one layer of one chunk at a time, when it is told to; the transport is `memory` with delivery by hand.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.audit import KvUse
from baton.layout import KvSlice
from baton.messages import AttemptId
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole, Route
from baton_kernels.block_copy import Move
from decode_node.core import DecodeCore
from engine.config import EngineConfig
from engine.engine import Engine
from kv_transfer.parts import slot_bytes_for
from kv_transfer.ranks import ReceiverRanks, SenderRanks, rank_name
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.slices import Rows
from kv_transfer.slot_copies import Mark, SlotCopies
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from node.core import RoleOptions
from node.events import Event
from node.kv_events.feed import KvFeed
from prefill_node.core import PrefillCore
from tests.protocol.fake_grammars import FakeGrammars
from tests.protocol.fake_model import EOS, VOCAB_SIZE, FakeModel
from tests.protocol.leftovers import leftovers

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
PART_BLOCKS = 2
MAX_NUM_SEQS = 6


def outward(incarnation: str) -> str:
    """The end of a decode node that requests move away from, in the names of streams and transports."""
    return f"{incarnation}>"


class LateCopies(SlotCopies):
    """Waits, as on a GPU, for work of the device that is not to come after a copy, and for no other."""

    def __init__(self, model: FakeModel, rank: int, staging: Staging, part_blocks: int) -> None:
        super().__init__(staging, model.rank_bytes(rank), model.layout, part_blocks, spin_wait=False)
        self._model = model

    def mark(self) -> Mark:
        return self._model.mark()

    def scatter(self, slot: int, ids: Sequence[int], rows: Rows, not_before: Mark, in_advance: bool = False) -> Move:
        move = super().scatter(slot, ids, rows, None, in_advance)

        def late() -> None:
            self._model.reach(not_before)
            move()

        return late


class Node:
    """`name` survives its death, `incarnation` does not. Of each role the node whose name ends with 1 runs ahead."""

    def __init__(
        self,
        name: str,
        role: NodeRole,
        incarnation: str,
        hub: MemoryHub,
        clock: Callable[[], float],
        num_blocks: int,
        num_slots: int,
        ranks: tuple[KvSlice, ...] = (),
        make_model: Callable[[int, int, tuple[KvSlice, ...]], FakeModel] = FakeModel,
        settings: Mapping[str, Any] = {},
        has_grammars: bool = False,
    ) -> None:
        """settings: of its engine, where they differ from `_core`'s; has_grammars: `FakeGrammars`."""
        self.name, self.role, self.incarnation, self._clock = name, role, incarnation, clock
        self.subscribed = False  # as the router sees it
        self.fenced: set[AttemptId] = set()  # work that it was told to abort
        self._awake = True  # its loop has a reason for a turn
        self.num_touches = 0  # while it stays the same, so do the node's accounts
        self.feed = KvFeed()
        self.model = make_model(num_blocks, BLOCK_SIZE, ranks)
        layout = self.model.layout
        sizes = [slot_bytes_for(PART_BLOCKS, layout.num_bytes(held)) for held in layout.ranks]
        self.stagings = [Staging(num_slots, slot_bytes, "cpu") for slot_bytes in sizes]
        self.transports = [
            MemoryTransport(hub, rank_name(incarnation, rank), staging, self._wake)
            for rank, staging in enumerate(self.stagings)
        ]
        self.out_stagings = [Staging(num_slots, slot_bytes, "cpu") for slot_bytes in sizes if role is NodeRole.DECODE]
        self.out_transports = [
            MemoryTransport(hub, rank_name(outward(incarnation), rank), staging, self._wake)
            for rank, staging in enumerate(self.out_stagings)
        ]
        self._grammars: Any = FakeGrammars(self.model) if has_grammars else None
        self.core = self._core(name.endswith("1"), num_blocks, settings)
        self.info = NodeInfo(
            role=role, incarnation=incarnation, node_id=name, address=name, served_model_name="fake",
            max_model_len=MAX_MODEL_LEN, max_num_seqs=self.core.engine.config.max_num_seqs, num_blocks=num_blocks,
            layout=self.model.layout, endpoints=(), tokenizer_digest="", chat_template="", special_tokens={},
            generation_defaults=GenerationDefaults(), vocab_size=VOCAB_SIZE,
        )  # fmt: skip

    def _core(self, ahead: bool, num_blocks: int, settings: Mapping[str, Any]) -> PrefillCore | DecodeCore:
        sizes = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 10, **settings}
        config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            block_size=BLOCK_SIZE,
            async_scheduling=ahead,
            windows=self.model.layout.windows,
            **sizes,
        )
        model, options = self.model, RoleOptions(self.incarnation, grammars=self._grammars)
        model.most_unknown = max(1, config.num_steps_ahead)
        engine = Engine(config, model, clock=self._clock)
        model.blocks, model.only_launches = engine.blocks, ahead
        if self.role is NodeRole.PREFILL:
            self.movers: Any = SenderRanks(self._senders(self.transports, self.stagings))
            return PrefillCore(
                engine,
                self.movers,
                options,
                layer_groups=min(2, model.layout.num_layers),
                whole_tokens=6 if ahead else 0,
            )
        receivers = []
        for rank, (transport, staging) in enumerate(zip(self.transports, self.stagings, strict=True)):
            parts = transport, staging, model.rank_bytes(rank)
            receiver = KvReceiver(*parts, model.layout, rank, verify=not ahead)
            receiver._copies = LateCopies(model, rank, self.stagings[rank], receiver.part_blocks)
            receivers.append(receiver)
        self.movers = ReceiverRanks(receivers)
        self.out_movers = SenderRanks(self._senders(self.out_transports, self.out_stagings))
        return DecodeCore(engine, self.movers, self.out_movers, options)

    def _senders(self, transports: list[MemoryTransport], stagings: list[Staging]) -> list[KvSender]:
        model = self.model
        return [
            KvSender(transport, staging, model.rank_bytes(rank), model.layout, rank)
            for rank, (transport, staging) in enumerate(zip(transports, stagings, strict=True))
        ]

    @property
    def transport(self) -> MemoryTransport:
        """The first rank's."""
        return self.transports[0]

    @property
    def staging(self) -> Staging:
        """The first rank's."""
        return self.stagings[0]

    def connect(self, peer: str, addresses: Sequence[bytes], is_target: bool = False) -> None:
        """Each rank with each of the peer's, which are there. is_target: requests move there from this decode node."""
        self.num_touches += 1
        movers = self.out_movers if is_target else self.movers
        ranks = itertools.product(range(len(self.transports)), enumerate(addresses))
        movers.connect(peer, [Route(rank, theirs, address) for rank, (theirs, address) in ranks], 1.0)

    def kill(self) -> None:
        """Its transports die."""
        for transport in (*self.transports, *self.out_transports):
            transport.hub.kill(transport.name)

    # ---- its loop: the turns that the engine's thread would have ----

    def hear(self, event: Event) -> None:
        self._wake()
        self.core.handle(event, self._clock())
        assert self.core.engine.blocks.now == self._clock()

    def open_feed(self) -> None:
        """Of a new session: so small that snapshots take several messages, and a backlog is dropped now and then."""
        self.feed = KvFeed(max_events=5, max_backlog=6)

    def has_turn(self) -> bool:
        """The engine's thread sleeps until something wakes it, or a deadline."""
        deadline = self.core.next_deadline()
        return self._awake or (deadline is not None and deadline <= self._clock())

    def prepare(self) -> None:
        self._awake = False
        self.num_touches += 1
        self.core.prepare(self._clock())
        assert self.core.engine.blocks.now == self._clock()

    def compute(self) -> None:
        self.num_touches += 1
        core, engine, now = self.core, self.core.engine, self._clock()
        if core.compute(now):
            self._wake()
            return
        due = engine.launch_at if self.role is NodeRole.DECODE else None
        if due is not None and due > now and any(s.num_tokens_to_go(MAX_MODEL_LEN) for s in engine.scheduler.running):
            deadline = core.next_deadline()
            assert deadline is not None, "a launch is put off for ever"
            assert deadline <= due, "a launch is put off for too long"

    def advance_device(self) -> None:
        """The device moves on, and wakes who waits for that."""
        self.model.advance()
        self._wake()

    def _wake(self) -> None:
        self._awake = True
        self.num_touches += 1

    # ---- what must hold ----

    @property
    def out_staging_in_use(self) -> int:
        """Slots with parts for other decode nodes."""
        return sum(staging.num_slots - staging.num_free for staging in self.out_stagings)

    @property
    def goes_on_at(self) -> float | None:
        """When it launches a step, or has a part leave, that it has put off."""
        part_at = self.core._outgoing._put_off.next() if isinstance(self.core, PrefillCore) else None
        return part_at if part_at is not None else self.core.engine.launch_at

    @property
    def idle(self) -> bool:
        return self.core.idle and self.core.device_busy_since is None

    def pool_is_whole(self) -> bool:
        blocks = self.core.engine.blocks
        return blocks.num_free + blocks.num_cached == blocks.num_total

    def check_integrity(self) -> None:
        self.core.check_integrity()
        for staging in (*self.stagings, *self.out_stagings):
            staging.check_integrity()

    def check_whole(self) -> None:
        """Nothing is held here."""
        assert self.pool_is_whole(), f"{self.incarnation} holds blocks"
        for staging in (*self.stagings, *self.out_stagings):
            assert staging.num_free == staging.num_slots, f"{self.incarnation} holds slots"
        while self.model.is_busy:  # with grammars of requests that have ended; the next turn then forgets them
            self.model.advance()
        self.core._matchers.take_failed()
        assert not (left := leftovers(self.core, self.incarnation)), left
        engine = self.core.engine
        assert engine.scheduler.num_reserved_seqs == engine.blocks.num_claimed == engine.waiting.num_tokens == 0
        assert not any(lane.num_held for lane in engine.waiting._lanes.values())

    def check_audit(self) -> None:
        """It names an owner for all that is counted, and nobody else."""
        now = self._clock()
        audit = self.core.audit(now)
        assert audit.integrity == "ok"
        listed = Counter(block.state for block in audit.blocks)
        assert listed == {state: count for state, count in audit.num_blocks.items() if count and state != "free"}
        uses_of = [holder.use for holder in audit.holders]
        for block in audit.blocks:
            uses = [uses_of[index] for index in block.holders]
            counts = (uses.count(KvUse.OWNS), uses.count(KvUse.READS), uses.count(KvUse.WRITES))
            assert counts == (block.ref, block.readers, block.writer)
            assert bool(block.hash) or block.state != "cached"
        assert {index for block in audit.blocks for index in block.holders} == set(range(len(audit.holders)))
        ages = [*(holder.age_s for holder in audit.holders), *(block.age_s for block in audit.blocks)]
        assert all(0 <= age_s <= now for age_s in ages)
        assert audit.num_slots == Counter(slot.state for slot in audit.slots)
        assert [slot.slot for slot in audit.slots] == list(range(len(audit.slots)))
        assert all((slot.state == "free") == (not slot.peer) for slot in audit.slots)
        if audit.idle:  # a launched step may still name blocks of a sequence that ended
            assert {holder.state for holder in audit.holders} <= {"finished"}
