"""What joins the processes of the raced cluster, and does its worst.

Each stream is a queue that keeps its order, as gRPC streams do; between streams any order is possible. A router's
session with a node and a handoff link between two nodes are a pair of streams each, and may break at any message: the
two ends hear of it in their own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from baton.handoff_messages import DecodeToPrefill, PrefillToDecode
from baton.messages import Abort, KvEvents, Load, Migrate, Prefill, Update
from node.events import FromPeer, PeerClosed, PeerOpened, SessionLost, SessionOpened, TargetEvent
from router.requests.core import RouterCore
from tests.protocol.node import PART_BLOCKS, Node, outward

EPOCH = 7
ROUTER = "router"

Delivery = Callable[[], None]


class Streams:
    """`queues`: what is on its way, (from, to) -> deliveries in order, and whether each is a message or the stream's
    own opening or end."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], deque[tuple[Delivery, bool]]] = {}

    def send(self, source: str, target: str, delivery: Delivery, *, message: bool = False) -> None:
        self.queues.setdefault((source, target), deque()).append((delivery, message))

    def busy(self) -> list[tuple[str, str]]:
        return [stream for stream, queue in self.queues.items() if queue]

    def deliver(self, source: str, target: str) -> None:
        """The next one arrives."""
        delivery, _ = self.queues[source, target].popleft()
        delivery()

    def repeat(self, source: str, target: str) -> None:
        """A message comes twice, the second time after all that follows it on its stream."""
        queue = self.queues[source, target]
        if queue[0][1]:
            queue.append(queue[0])

    def cut(self, source: str, target: str) -> None:
        """A stream breaks: its second half was not on the wire yet."""
        queue = self.queues.get((source, target), deque())
        for _ in range(len(queue) // 2):
            queue.pop()

    def kill(self, process: str, in_order: bool = False) -> None:
        """All of its streams break, and nobody reads those to it. in_order: all that it has said arrives."""
        for source, target in [stream for stream in self.queues if process in stream]:
            if not in_order:
                self.cut(source, target)
            if target == process:
                del self.queues[source, target]


class Sessions:
    """The router's streams to the nodes, one pair for each."""

    def __init__(
        self, router: RouterCore, nodes: dict[str, Node], streams: Streams, clock: Callable[[], float]
    ) -> None:
        self._router = router
        self._nodes = nodes
        self._streams = streams
        self._clock = clock

    def open(self, node: Node) -> None:
        def opened() -> None:
            node.open_feed()
            node.hear(SessionOpened(EPOCH))
            self._streams.send(node.incarnation, ROUTER, up)

        def up() -> None:
            node.subscribed = True
            self._router.node_up(node.info, self._clock())
            self._router.node_load(node.incarnation, Load(), self._clock())  # no credits: its own queue is raced, too

        self._streams.send(ROUTER, node.incarnation, opened)

    def break_off(self, node: Node) -> None:
        """The node lives on; what was under way is lost, from some message on."""
        self._streams.cut(ROUTER, node.incarnation)
        self._streams.cut(node.incarnation, ROUTER)
        self._streams.send(ROUTER, node.incarnation, lambda: node.hear(SessionLost(EPOCH)))

        def lost() -> None:
            node.subscribed = False
            self._router.node_lost(node.incarnation, "stream broke", self._clock())
            if node.incarnation in self._nodes:
                self.open(node)

        self._streams.send(node.incarnation, ROUTER, lost)

    def tell_of_stop(self, node: Node) -> None:
        """Its load says that it takes no new work."""
        stops = Load(draining=True)
        told = partial(self._router.node_load, node.incarnation, stops)
        self._streams.send(node.incarnation, ROUTER, lambda: told(self._clock()))

    def kill(self, node: Node) -> None:
        """The router hears of its death."""

        def died() -> None:
            self._router.node_lost(node.incarnation, "died", self._clock())

        self._streams.send(node.incarnation, ROUTER, died)

    def tell_node(self, incarnation: str, message: Prefill | Abort | Migrate) -> None:
        def delivery() -> None:
            if incarnation in self._nodes:
                self._nodes[incarnation].hear(message)

        self._streams.send(ROUTER, incarnation, delivery, message=True)

    def tell_router(self, incarnation: str, updates: list[Update]) -> None:
        """All that one turn has to tell travels as one message: a token and its sample's end are never parted."""

        def delivery() -> None:
            for update in updates:
                self._router.update(incarnation, update, self._clock())

        self._streams.send(incarnation, ROUTER, delivery, message=True)

    def publish(self, incarnation: str, events: KvEvents) -> None:
        """Never repeated: a stream does not do that, and the router would take it for a gap."""
        self._streams.send(incarnation, ROUTER, lambda: self._router.node_blocks(incarnation, events))


class Links:
    """Handoff links, each with a number of its own. `up`: (me, peer) -> the link that is up, as `me` believes. The end
    of a decode node that has opened the link, since requests move along it, is named `outward`."""

    def __init__(self, nodes: dict[str, Node], streams: Streams, serials: Iterator[int]) -> None:
        self.up: dict[tuple[str, str], int] = {}
        self._nodes = nodes
        self._streams = streams
        self._serials = serials

    def open(self, prefill: str, decode: str) -> None:
        """The prefill node, or a decode node's outward end, says hello and goes on talking; each end connects its
        transport when it hears the other."""
        link = self.up[prefill, decode] = next(self._serials)

        def hello() -> None:
            if (decode, prefill) in self.up:
                self._close(decode, prefill, self.up[decode, prefill], "replaced")
            self.up[decode, prefill] = link
            self._connect(decode, prefill, link)
            self._streams.send(decode, prefill, lambda: self._connect(prefill, decode, link))

        if decode in self._nodes:
            self._streams.send(prefill, decode, hello)
        else:
            self._streams.send(decode, prefill, lambda: self._close(prefill, decode, link, "connection refused"))

    def say(self, me: str, peer: str, message: PrefillToDecode | DecodeToPrefill) -> None:
        link = self.up[me, peer]

        def delivery() -> None:
            if _node_of(peer) in self._nodes and self.up.get((peer, me)) == link:
                self._hear(peer, FromPeer(_node_of(me), message))

        self._streams.send(me, peer, delivery, message=True)

    def break_off(self, me: str, peer: str, reason: str, in_order: bool = False) -> None:
        """All streams between the two break: each end hears of it in its own time. in_order: and of all before."""
        for this, other in ((me, peer), (peer, me)):
            if not in_order:
                self._streams.cut(other, this)
            for link in {self.up.get((me, peer)), self.up.get((peer, me))} - {None}:
                self._streams.send(other, this, partial(self._close, this, other, link, reason))

    def kill(self, incarnation: str, in_order: bool = False) -> None:
        """All of a node's links break with its death, or end with it in order."""
        for end in (incarnation, outward(incarnation)):
            for peer in sorted({p for link in self.up if end in link for p in link} - {end}):
                self.break_off(end, peer, "died", in_order)
            for link in [link for link in self.up if link[0] == end]:
                del self.up[link]

    def _connect(self, me: str, peer: str, link: int) -> None:
        name = _node_of(peer)
        if _node_of(me) in self._nodes and name in self._nodes and self.up.get((me, peer)) == link:
            theirs = self._nodes[name]
            transports = theirs.transports if peer == name else theirs.out_transports
            self._nodes[_node_of(me)].connect(name, [t.info() for t in transports], is_target=me != _node_of(me))
            self._hear(me, PeerOpened(name, PART_BLOCKS, theirs.model.layout))

    def _close(self, me: str, peer: str, link: int | None, reason: str) -> None:
        if _node_of(me) in self._nodes and self.up.get((me, peer)) == link:
            del self.up[me, peer]
            node = self._nodes[_node_of(me)]
            (node.movers if me == node.incarnation else node.out_movers).disconnect(_node_of(peer))
            self._hear(me, PeerClosed(_node_of(peer), reason))

    def _hear(self, me: str, event: PeerOpened | PeerClosed | FromPeer) -> None:
        node = self._nodes[_node_of(me)]
        node.hear(event if me == node.incarnation else TargetEvent(event))


def _node_of(end: str) -> str:
    return end.removesuffix(outward(""))
