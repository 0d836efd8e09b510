"""From settings to all parts of a node except its network: model, staging slots, transport, the role's core.

build  ->  slots, transport  ->  the role: its mover and its core  ->  NodeParts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.incarnation import new_incarnation
from baton.layout import KvSlice
from baton.node_info import TransportEndpoint
from kv_transfer.parts import slot_bytes_for
from kv_transfer.remote import RemotePool
from node.base import Base, Link
from node.core import RoleCore
from node.describe import count, describe
from node.handoffs.stream import PeerTransport
from node.kv_events_config import KvEventsConfig
from node.logits_processors import LogitsProcessors
from node.ranks.ranks import Ranks
from node.settings import NodeSettings
from node.shell import Closeable, NodeParts, OutwardTransport
from node.slots import slot_sizes

if TYPE_CHECKING:
    from torch import Tensor


class Mover(PeerTransport, Protocol):
    """What the shell uses of a role's senders or receivers, of which each rank has one."""

    num_slots: int
    """The sum over all ranks."""

    @property
    def part_blocks(self) -> int:
        """The most blocks in a part."""

    @property
    def num_free_slots(self) -> int:
        """Callable from any thread."""

    def warm_up(self) -> None:
        """Do the work that would delay the first parts. On the engine's thread, before any part."""


@dataclass(frozen=True, slots=True)
class RoleParts:
    """A role: its state machine and its mover. `outward`: what sends to nodes of the same role, and the addresses of
    its transports. `count_damaged`: pieces of KV blocks with wrong checksums so far."""

    core: RoleCore
    mover: Mover
    outward: tuple[Mover, Sequence[bytes]] | None = None
    count_damaged: Callable[[], int] = lambda: 0


MakeRole = Callable[[Base], RoleParts]
"""Builds the role on its base."""


def assemble(
    make_role: MakeRole,
    settings: NodeSettings,
    wake: Callable[[], None],
    ranks: Ranks | None = None,
) -> NodeParts:
    """Load the model and build the role on it. `wake` is called, on any thread, when the core should have a turn.
    ranks: the node's other ranks, if there are any. Raises ValueError, OSError or a BatonError, each readable for
    users."""
    base = _make_base(settings, wake, ranks)
    role, built = make_role(base), base.built
    movers = [role.mover] if role.outward is None else [role.mover, role.outward[0]]

    def warm_up() -> None:
        for mover in movers:
            mover.warm_up()  # not while ranks on other hosts, for which nothing waits, may capture graphs
        built.warm_up()

    return NodeParts(
        kv_events=_follow_blocks(settings, role.core, built.layout.block_size),
        role=role.core,
        warm_up=warm_up,
        transport=role.mover,
        info=describe(
            settings, role.core.role, built, base.incarnation, [link.transport.info() for link in base.links]
        ),
        tokenizer=built.tokenizer.json,
        part_blocks=role.mover.part_blocks,
        count=lambda: count(built, role.count_damaged()),
        num_slots=sum(mover.num_slots for mover in movers),
        count_free_slots=lambda: sum(mover.num_free_slots for mover in movers),
        outward=_outward(settings, role),
        watch_steps=built.engine.counters.watch,
        experts=built.experts,
        peers=base.peers,
    )


def _follow_blocks(settings: NodeSettings, core: RoleCore, block_size: int) -> Closeable | None:
    """Raises ValueError."""
    stated = settings.kv_events_config
    config = None if stated is None else KvEventsConfig.parse(stated)
    if config is None or not config.publishes:
        return None
    from node.kv_events.publisher import KvEventPublisher, KvEvents

    model = settings.model_name
    publisher = KvEventPublisher(config, f"kv@{settings.name(core.role)}@{model}")
    core.block_changes.follow(KvEvents(publisher, block_size))
    return publisher


def _outward(settings: NodeSettings, role: RoleParts) -> OutwardTransport | None:
    if role.outward is None:
        return None
    mover, addresses = role.outward
    endpoints = (TransportEndpoint(rank, settings.carried_by, address) for rank, address in enumerate(addresses))
    return OutwardTransport(mover, tuple(endpoints))


def _make_base(settings: NodeSettings, wake: Callable[[], None], ranks: Ranks | None) -> Base:
    if settings.engine == "simulated":
        from node.simulated import make_simulated_base

        return make_simulated_base(settings, wake)
    return _make_torch_base(settings, wake, LogitsProcessors.installed(), ranks)


def _make_torch_base(
    settings: NodeSettings, wake: Callable[[], None], processors: LogitsProcessors, ranks: Ranks | None
) -> Base:
    # torch and numpy, which a simulated node does without
    from baton.structured_output.constraint import StructuredBackend
    from node.build import build
    from node.ranks.pool_links import make_link
    from node.structured_output.grammars import Grammars

    built = build(settings, wake, ranks)
    layout, sizes = built.layout, slot_sizes(settings, built.layout.rank_block_bytes, built.on_gpu)

    def link_of(num_slots: int, held: KvSlice, pool: Tensor | RemotePool) -> Link:
        slot_bytes = slot_bytes_for(sizes.part_blocks, layout.num_bytes(held))
        if isinstance(pool, RemotePool):
            return Link(*pool.open_link(num_slots, slot_bytes, sizes.part_blocks, wake))
        return Link(*make_link(settings, pool.device, settings.listen.host, num_slots, slot_bytes, wake))

    def make_links(num_slots: int) -> list[Link]:
        return [link_of(num_slots, *rank) for rank in zip(layout.ranks, built.pools, strict=True)]

    links = make_links(sizes.num_slots)
    config = built.engine.config
    backend = StructuredBackend(settings.structured_outputs_backend)
    grammars = Grammars(built.tokenizer.json, config.vocab_size, config.eos_token_ids, wake, backend)
    incarnation = new_incarnation() if built.peers is None else built.peers.incarnation
    return Base(settings, built, links, make_links, incarnation, grammars, processors, built.peers)
