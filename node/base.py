"""What a role of a node is built on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from baton.layout import KvLayout
from kv_transfer.mover import KvMover
from kv_transfer.slots import Slots
from kv_transfer.transport import Transport
from node.core import RoleOptions
from node.describe import ServedModel
from node.logits_processors import LogitsProcessors
from node.peers.nodes import PeerNodes
from node.settings import NodeSettings

if TYPE_CHECKING:
    from node.structured_output.grammars import Grammars


class Link(NamedTuple):
    """The staging slots of one rank, and what carries their contents."""

    staging: Slots
    transport: Transport


M = TypeVar("M", bound=KvMover, covariant=True)


class MakeMover(Protocol[M]):
    """KvSender, or KvReceiver."""

    def __call__(
        self, transport: Transport, staging: Slots, pool_bytes: Any, layout: KvLayout, rank: int, *, verify: bool
    ) -> M: ...


@dataclass(frozen=True, slots=True)
class Base:
    """What a role is built on: a model, and a link for each rank. With a simulated model there are no grammars.

    make_links: makes further links, with this many slots of the same size, for movers of the other direction; raises
    TransferError. peers: the other data parallel nodes."""

    settings: NodeSettings
    built: ServedModel
    links: Sequence[Link]
    make_links: Callable[[int], Sequence[Link]]
    incarnation: str
    grammars: Grammars | None
    processors: LogitsProcessors
    peers: PeerNodes | None = None

    @property
    def role_options(self) -> RoleOptions:
        """The options of the role's core."""
        return RoleOptions(
            incarnation=self.incarnation,
            max_waiting=self.settings.max_waiting,
            max_deadline_s=self.settings.request_timeout,
            grammars=self.grammars,
            processors=self.processors,
        )

    def movers(self, make: MakeMover[M], links: Sequence[Link]) -> list[M]:
        """A mover for each rank, over these links."""
        layout, verify = self.built.layout, self.settings.verify_transfers
        return [
            make(link.transport, link.staging, pool, layout, rank, verify=verify)
            for rank, (link, pool) in enumerate(zip(links, self.built.pools, strict=True))
        ]
