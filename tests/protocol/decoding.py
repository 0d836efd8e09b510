"""A decode node alone: its router and its prefill node are the test, which hands over prompts with the right KV."""

from __future__ import annotations

import dataclasses
from typing import Any

from baton.block_hash import chain
from baton.errors import BatonError
from baton.handoff_messages import Commit, CommitReply, Grant, Refuse, Reserve
from baton.layout import num_blocks_for
from baton.messages import AttemptId, End, Prefill, Sample, Tokens, Update, UpdateKind
from baton.sampling import SamplingParams
from kv_transfer.parts import PartPlanner, PlannedPart, slot_bytes_for
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryTransport
from node.events import Event, FromPeer, PeerOpened, SessionOpened, ToPrefill
from tests.protocol.fake_model import NUM_LAYERS, FakeModel, expected_output
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, PART_BLOCKS
from tests.protocol.world import World

PEER = "p"
WORK = AttemptId(EPOCH, "r", 1)
PROMPT = tuple(range(2, 12))
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)
WANT = [expected_output(PROMPT, SAMPLING, sample, MAX_MODEL_LEN)[0] for sample in range(MAX_NUM_SEQS)]


class Decoding:
    """`said`: to the prefill node. `told`: to the router, what of which work. Time is `now`."""

    def __init__(self, num_blocks: int = 40, num_slots: int = 3) -> None:
        self.world = World(num_prefill=0, num_decode=1, num_blocks=num_blocks, num_slots=num_slots)
        (self.node,) = self.world.nodes.values()
        self.core = self.node.core
        self.said: list[object] = []
        self.told: list[tuple[AttemptId, UpdateKind]] = []
        layout, self.hub = self.node.model.layout, self.world.hub
        self._source = FakeModel(20, BLOCK_SIZE)
        staging = Staging(16, slot_bytes_for(PART_BLOCKS, layout.block_bytes), "cpu")
        transport = MemoryTransport(self.hub, PEER, staging, lambda: None)
        self._sender = KvSender(transport, staging, self._source.pool_bytes, layout)
        self.node.connect(PEER, [transport.info()])
        transport.connect(self.node.incarnation, self.node.transport.info())
        self.hear(SessionOpened(EPOCH), PeerOpened(PEER, PART_BLOCKS, layout))

    @property
    def now(self) -> float:
        return self.world.now

    def hear(self, *events: Event) -> None:
        """Without a turn."""
        for event in events:
            self.node.hear(event)

    def turn(self) -> bool:
        """One turn; whether it wants another at once."""
        self.core.prepare(self.now)
        again = self.core.compute(self.now)
        self.node.check_integrity()
        for output in self.core.take_outputs():
            if isinstance(output, ToPrefill):
                self.said.append(output.message)
            elif isinstance(output, Update):
                self.told.append((output.attempt_id, output.kind))
        return again

    def run(self) -> None:
        """Turns, until nothing is left to be done."""
        for _ in range(500):
            self.turn()
            if self.node.model.is_busy:
                self.node.advance_device()
            elif not self.core.engine.has_work:
                return
        raise AssertionError("it does not come to an end")

    # ---- what others say ----

    def reserve(
        self, attempt_id: AttemptId = WORK, prompt: tuple[int, ...] = PROMPT, n: int = 1, **fields: object
    ) -> None:
        """A Reserve, and a turn."""
        hashes = tuple(chain(prompt, BLOCK_SIZE))
        plain = Reserve(attempt_id, self.node.incarnation, len(prompt), hashes, n, 60.0, len(prompt) + 4)
        self.hear(FromPeer(PEER, dataclasses.replace(plain, **fields)))  # type: ignore[arg-type]
        self.turn()

    def send(self, grant: Grant, prompt: tuple[int, ...] = PROMPT, pieces: slice = slice(None)) -> None:
        """Some parts of the lease, or all: pushed and delivered. No turn."""
        for position, token in enumerate(prompt):
            for layer in range(NUM_LAYERS):
                block, offset = 1 + position // BLOCK_SIZE, position % BLOCK_SIZE
                self._source.write(block, layer, offset, FakeModel._kv(layer, position, token))
        for number, piece in list(enumerate(self.parts(grant, prompt)))[pieces]:
            blocks = list(range(1 + piece.first, 1 + piece.first + piece.num_blocks))
            assert self._sender.send(self.node.incarnation, grant.lease, number, blocks, checked=True)
            self.hub.deliver_all()
            self._sender.poll()

    def parts(self, grant: Grant, prompt: tuple[int, ...] = PROMPT) -> tuple[PlannedPart, ...]:
        end = num_blocks_for(len(prompt), BLOCK_SIZE)
        layout = self.node.model.layout
        return PartPlanner(layout, layout, (PART_BLOCKS, PART_BLOCKS)).plan(grant.num_held_blocks, end)

    def commit(
        self, grant: Grant, samples: dict[int, tuple[int, ...]], prompt: tuple[int, ...] = PROMPT, **fields: object
    ) -> None:
        """A Commit with these outputs, and a turn."""
        outputs = tuple(Sample(index, tokens) for index, tokens in samples.items())
        plain = Commit(grant.lease, grant.attempt_id, self.node.incarnation, prompt, outputs, SAMPLING, 60.0)
        self.hear(FromPeer(PEER, dataclasses.replace(plain, **fields)))  # type: ignore[arg-type]
        self.turn()

    def prefill(self, name: str, prompt: tuple[int, ...] = PROMPT, n: int = 1, **sampling: object) -> AttemptId:
        """A prompt sent here directly. No turn."""
        attempt_id = AttemptId(EPOCH, name, 0)
        params = dataclasses.replace(SAMPLING, **sampling)  # type: ignore[arg-type]
        samples = tuple(map(Sample, range(n)))
        self.hear(Prefill(attempt_id, self.node.incarnation, prompt, samples, params, 60.0))
        return attempt_id

    # ---- what it said ----

    @property
    def grants(self) -> list[Grant]:
        return [message for message in self.said if isinstance(message, Grant)]

    @property
    def replies(self) -> list[CommitReply]:
        return [message for message in self.said if isinstance(message, CommitReply)]

    def kinds(self, kind: type, attempt_id: AttemptId = WORK) -> list[object]:
        return [told for about, told in self.told if about == attempt_id and isinstance(told, kind)]

    def output(self, sample: int, attempt_id: AttemptId = WORK) -> list[int]:
        told = [kind for about, kind in self.told if about == attempt_id and isinstance(kind, Tokens)]
        return [token for tokens in told if tokens.sample == sample for token in tokens.token_ids]


def named(number: int) -> AttemptId:
    return AttemptId(EPOCH, f"r{number}", 0)


def refusals(decoding: Decoding) -> list[type[BatonError]]:
    return [type(message.error) for message in decoding.said if isinstance(message, Refuse)]


def ends(decoding: Decoding, attempt_id: AttemptId = WORK) -> list[type[BatonError] | None]:
    found = decoding.kinds(End, attempt_id)
    return [type(end.error) if end.error else None for end in found]  # type: ignore[attr-defined]


def first_tokens(*samples: int) -> dict[int, tuple[int, ...]]:
    return {sample: (WANT[sample][0],) for sample in samples}


def hand_over(decoding: Decoding, n: int = 1, **fields: Any) -> None:
    """WORK, all of it: granted, its parts sent, committed with `n` samples."""
    decoding.reserve(n=n)
    decoding.send(decoding.grants[-1])
    decoding.commit(decoding.grants[-1], first_tokens(*range(n)), **fields)
