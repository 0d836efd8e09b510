"""Which parts a handoff has, and when they leave: the data plane's half of a sender."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from baton.handoff_messages import Grant
from baton.layout import KvLayout
from engine.block_manager import NULL_BLOCK
from engine.engine import Engine
from engine.sequence import Sequence
from kv_transfer.parts import PartPlanner, PlannedPart
from kv_transfer.ranks import SenderRanks
from node.handoffs.flights import Flights
from node.handoffs.sending import Drain, KvSending


class PartsOut:
    """A prompt's last chunk travels in `layer_groups` groups of layers if it has more than `whole_tokens` tokens.
    `planners`: for each decode node whose stream is up, by incarnation, what plans its parts. `flights`: the parts that
    were handed to the transport and have not left yet."""

    def __init__(self, engine: Engine, sender: SenderRanks, layer_groups: int, whole_tokens: int) -> None:
        self._engine = engine
        self._sender = sender
        self._layer_groups = layer_groups
        self._whole_tokens = whole_tokens
        self.planners: dict[str, PartPlanner] = {}
        self.flights = Flights()

    def open(self, incarnation: str, layout: KvLayout, part_blocks: int) -> None:
        """The decode node's stream is up; its layout is compatible."""
        self.planners[incarnation] = self._sender.planner(layout, part_blocks)

    def close(self, incarnation: str) -> None:
        """The decode node's stream is down."""
        self.planners.pop(incarnation, None)

    def is_open(self, incarnation: str) -> bool:
        """Whether the decode node's stream is up."""
        return incarnation in self.planners

    def tail(self, sequence: Sequence) -> tuple[int, int]:
        """The first block of the prompt that travels in groups of layers, and the number of groups. Call it when the
        first chunk is scheduled."""
        last_chunk = self._start_of_last_chunk(sequence)
        if sequence.num_tokens - last_chunk > self._whole_tokens:
            return last_chunk // self._engine.config.block_size, self._layer_groups
        return 0, 1

    def plan(self, sending: KvSending, grant: Grant) -> tuple[Seq[int], tuple[PlannedPart, ...]]:
        """The entries and the parts to send, as the decode node that granted should expect them."""
        assert sending.target is not None
        shape = self._engine.tables.shape
        held = (*grant.held, *[0] * shape.width)[: shape.width]  # a grant may have any number of these
        least = sending.num_tokens - sending.num_spare_tokens
        entries = shape.lacking(shape.num_columns(sending.num_tokens), least, held)
        tail = sending.grouped_from_block * shape.width, sending.layer_groups
        return entries, self.planners[sending.target.incarnation].of_entries(entries, *tail)

    @property
    def has_slot(self) -> bool:
        """Whether one more part can leave."""
        return self._sender.num_free_slots > 0

    def send(self, sending: KvSending, num_layers: int, now: float) -> bool:
        """Gather and push the parts that are computed, may leave now, and have a slot at both ends. num_layers: how
        many layers of the model have the KV of the prompt's last chunk. False: no slot is free here for the next
        part."""
        if sending.grant is None or sending.target is None:
            return True
        blocks, grant, peer = self._engine.blocks, sending.grant, sending.target.incarnation
        checked = grant.checksums or self._sender.verify
        shape = self._engine.tables.shape
        with self._sender.batched():
            while not sending.is_put_off(now) and (part := sending.ready_part(shape, num_layers)):
                named = sending.blocks_of(part)
                pinned = [block for block in named if block != NULL_BLOCK]
                blocks.pin_read(pinned)
                sent = self._sender.send(peer, grant.lease, sending.next_part, part, named, checked)
                blocks.unpin_read(pinned)
                if not sent:
                    return False
                self.flights.begun(peer, now)
                sending.part_leaves(now, shape)
        return True

    def drain(self, peer: str, lease: int, drain: Drain, now: float) -> bool:
        """Use up the credits of a dead lease. False: no slot is free here for the next part."""
        while drain.next_part < drain.credits:
            if not self._sender.drain(peer, lease, drain.next_part, self.planners[peer]):
                return False
            self.flights.begun(peer, now)
            drain.next_part += 1
        return True

    def _start_of_last_chunk(self, sequence: Sequence) -> int:
        """The first token of the last chunk, estimated when the first chunk is scheduled. It is exact if no other
        prompt uses the budget of tokens; otherwise more or less of the prompt travels in groups of layers, which is
        correct but slower."""
        rest = sequence.num_tokens - sequence.num_launched_tokens
        if not rest:
            return sequence.num_computed_tokens
        budget = self._engine.config.max_num_batched_tokens
        return sequence.num_tokens - ((rest - 1) % budget + 1)
