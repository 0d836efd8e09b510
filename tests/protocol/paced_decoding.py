"""A decode node that runs ahead, at the steps of one request."""

from __future__ import annotations

from baton.block_hash import chain
from baton.handoff_messages import Commit, Grant, Reserve
from baton.messages import AttemptId, Prefill, Sample, Update, UpdateKind
from baton.sampling import SamplingParams
from decode_node.core import DecodeCore
from node.events import FromPeer, PeerOpened, SessionOpened, ToPrefill
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE, PART_BLOCKS
from tests.protocol.world import World

OLD, NEW = AttemptId(EPOCH, "old", 0), AttemptId(EPOCH, "new", 0)
PROMPT = tuple(range(2, 2 + 2 * BLOCK_SIZE))
ENDLESS = SamplingParams(max_tokens=50, ignore_eos=True)
STEP_S = 0.010


class Decoding:
    """A decode node at the steps of OLD, one of which has just begun; each takes STEP_S. NEW's KV is in its cache, so
    that a Commit is all that is missing."""

    def __init__(self, num_slots: int = 3) -> None:
        self.world = World(num_prefill=1, num_decode=2, num_slots=num_slots)
        self.node = next(node for node in self.world.nodes.values() if node.name == "decode-1")
        core = self.node.core
        assert isinstance(core, DecodeCore)
        self.core = core
        self.said: list[tuple[AttemptId, UpdateKind]] = []
        self.grants: list[Grant] = []
        self.again = False
        core.handle(SessionOpened(EPOCH), 0.0)
        core.handle(PeerOpened("p", PART_BLOCKS, core.receiver.layout), 0.0)
        core.handle(Prefill(OLD, self.node.incarnation, PROMPT, (Sample(0),), ENDLESS, 60.0), 0.0)
        self.turn()
        for _ in range(5):
            self.wait_until(self.core.engine.launch_at or self.now)
            self.turn()
            began = self.core.device_busy_since
            assert began is not None
            self.wait_until(began + STEP_S)
            self.finish_step()
            self.turn()
        self.said.clear()

    @property
    def now(self) -> float:
        return self.world.now

    def wait_until(self, time: float) -> None:
        assert time >= self.now
        self.world.now = time

    @property
    def num_in_flight(self) -> int:
        return len(self.core.engine._in_flight)

    def turn(self) -> None:
        self.core.prepare(self.now)
        self.again = self.core.compute(self.now)
        self.core.check_integrity()
        for output in self.core.take_outputs():
            if isinstance(output, Update):
                self.said.append((output.attempt_id, output.kind))
            elif isinstance(output, ToPrefill) and isinstance(output.message, Grant):
                self.grants.append(output.message)

    def finish_step(self) -> None:
        oldest = self.core.engine._in_flight[0].step
        while not oldest.is_done():
            self.node.model.advance()

    def finish_all(self) -> None:
        """Take turns until no step is in flight."""
        self.turn()
        while self.num_in_flight:
            self.finish_step()
            self.turn()

    def reserve(self, deadline_s: float = 60.0) -> int:
        hashes = tuple(chain(PROMPT, BLOCK_SIZE))
        message = Reserve(NEW, self.node.incarnation, len(PROMPT), hashes, 1, deadline_s, 60)
        self.core.handle(FromPeer("p", message), self.now)
        self.turn()
        assert self.grants[-1].num_parts == 0
        return self.grants[-1].lease

    def reserve_fresh(self, name: str) -> None:
        """Ask for room for three blocks, of which none is here."""
        attempt_id = AttemptId(EPOCH, name, 0)
        message = Reserve(attempt_id, self.node.incarnation, 3 * BLOCK_SIZE, (), 1, 60.0, 60)
        self.core.handle(FromPeer("p", message), self.now)

    def commit(self, lease: int, age_s: float = 0.0, deadline_s: float = 60.0) -> None:
        self.core.handle(FromPeer("p", self.commit_of(lease, age_s, deadline_s)), self.now)
        self.turn()

    def commit_of(self, lease: int, age_s: float = 0.0, deadline_s: float = 60.0) -> Commit:
        samples = (Sample(0, (90,)),)
        return Commit(lease, NEW, self.node.incarnation, PROMPT, samples, ENDLESS, deadline_s, age_s=age_s)

    def told(self, kind: type) -> list[UpdateKind]:
        return [said for attempt_id, said in self.said if attempt_id == NEW and isinstance(said, kind)]
