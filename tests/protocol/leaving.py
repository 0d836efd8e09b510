"""A decode node that a request moves away from: its router and the decode node that it moves to are the test."""

from __future__ import annotations

from baton.errors import BatonError
from baton.handoff_messages import Commit, CommitReply, Grant, Landed, PrefillToDecode, Refuse, Reserve
from baton.layout import num_blocks_for
from baton.messages import AttemptId, DecodeTarget, Migrate, Prefill, Sample, Tokens, Update, UpdateKind
from baton.sampling import SamplingParams
from decode_node.core import DecodeCore
from kv_transfer.parts import PartPlanner, tag_of
from kv_transfer.staging import SlotOwner
from node.events import Event, FromPeer, PeerOpened, SessionOpened, TargetEvent, ToDecode
from tests.protocol.fake_model import expected_output
from tests.protocol.network import EPOCH
from tests.protocol.node import BLOCK_SIZE, MAX_MODEL_LEN, PART_BLOCKS
from tests.protocol.world import World

WORK = AttemptId(EPOCH, "r", 1)
PROMPT = tuple(range(2, 13))
SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
LEASE = 1


class Leaving:
    """`said`: to the target; `told`: to the router. ahead: whether the node launches steps ahead."""

    def __init__(self, ahead: bool, num_tokens: int = 3) -> None:
        self.world = World(num_prefill=0, num_decode=2, num_slots=12)
        nodes = list(self.world.nodes.values())
        self.node, self.target = nodes[ahead], nodes[not ahead]
        assert isinstance(self.node.core, DecodeCore)
        self.core = self.node.core
        self.said: list[PrefillToDecode] = []
        self.told: list[UpdateKind] = []
        self.num_received = self.num_granted = 0
        self.node.connect(self.target.incarnation, [self.target.transport.info()], is_target=True)
        self.target.transport.connect(self.node.incarnation, self.node.out_transports[0].info())
        opened = PeerOpened(self.target.incarnation, PART_BLOCKS, self.node.model.layout)
        self.hear(SessionOpened(EPOCH), TargetEvent(opened))
        self.hear(Prefill(WORK, self.node.incarnation, PROMPT, (Sample(0),), SAMPLING, 60.0))
        while len(self.output) < num_tokens:
            self.step()

    # ---- what happens ----

    def hear(self, *events: Event) -> None:
        """Without a turn."""
        for event in events:
            self.node.hear(event)

    def turn(self) -> bool:
        """One turn; whether it wants another at once."""
        self.core.prepare(self.world.now)
        self._collect()
        again = self.core.compute(self.world.now)
        self._collect()
        self.node.check_integrity()
        return again

    def step(self) -> None:
        """A turn, and what is launched is computed."""
        self.turn()
        while self.node.model.is_busy:
            self.node.model.advance()

    def migrate(self, move: int = 1) -> None:
        self.hear(Migrate(WORK, move, DecodeTarget("there", self.target.incarnation)))
        self.turn()

    def from_target(self, *messages: Grant | Refuse | CommitReply | Landed) -> None:
        self.hear(*(TargetEvent(FromPeer(self.target.incarnation, message)) for message in messages))
        self.turn()

    def grant(self, num_credits: int | None = None, lease: int = LEASE) -> None:
        """Room for the last Reserve; None: with credits for all parts."""
        reserve = [message for message in self.said if isinstance(message, Reserve)][-1]
        layout = self.node.model.layout
        end = num_blocks_for(reserve.num_tokens, BLOCK_SIZE)
        num_parts = len(PartPlanner(layout, layout, (PART_BLOCKS, PART_BLOCKS)).plan(0, end))
        self.num_granted = num_parts if num_credits is None else num_credits
        self.from_target(Grant(WORK, lease, 0, num_parts, self.num_granted))

    def reply(self, error: BatonError | None = None) -> None:
        self.from_target(CommitReply(LEASE, WORK, error))

    def receive(self) -> None:
        """The target takes in all parts that it has granted a slot for."""
        for part in range(self.num_received, self.num_granted):
            slot = self.target.staging.take(SlotOwner(self.node.incarnation, LEASE, part))
            assert slot is not None
            self.target.staging.lend(slot)
            tag, num_bytes = tag_of(LEASE, part), self.target.staging.slot_bytes
            self.target.transport.expect(self.node.incarnation, tag, slot, num_bytes)
        self.num_received = self.num_granted
        self.world.hub.deliver_all()
        self.turn()

    def until_committed(self) -> Commit:
        while not self.commits:
            self.step()
        return self.commits[0]

    def run_out(self) -> None:
        """Until nothing is left here: the target ends its lease, and takes in what it has granted."""
        self.from_target(Refuse(WORK, BatonError("the lease is over")))
        for _ in range(100):
            self.step()
            self.receive()
            if self.node.idle:
                return self.node.check_whole()
        raise AssertionError("it does not come to an end")

    def _collect(self) -> None:
        for output in self.core.take_outputs():
            if isinstance(output, ToDecode):
                self.said.append(output.message)
            elif isinstance(output, Update) and output.attempt_id == WORK:
                self.told.append(output.kind)

    # ---- what it said ----

    @property
    def commits(self) -> list[Commit]:
        return [message for message in self.said if isinstance(message, Commit)]

    @property
    def output(self) -> list[int]:
        """The tokens told, of which none is missing or repeated."""
        output: list[int] = []
        for tokens in self.kinds(Tokens):
            assert isinstance(tokens, Tokens)
            assert tokens.first_index == len(output)
            output += tokens.token_ids
        assert output == self.wanted[: len(output)]
        return output

    @property
    def wanted(self) -> list[int]:
        return expected_output(PROMPT, SAMPLING, 0, MAX_MODEL_LEN)[0]

    def kinds(self, kind: type) -> list[UpdateKind]:
        return [told for told in self.told if isinstance(told, kind)]
