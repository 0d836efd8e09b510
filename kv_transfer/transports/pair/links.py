"""The links of a `PairTransport`: a peer's two connections, from the first dial until all operations on both are over.

    dialled              --> Link.out    --.
    called --> unclaimed --> Link.inward --+--> leaving --> closed
                  `------------------------'

`Links` owns the links by peer, the connections from peers that `connect` has not named yet (unclaimed), and those that
are leaving. It completes `connect` calls and emits PeerDisconnected. `messages.py` handles the messages on the
connections and emits all other events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from baton.errors import TransferError
from baton.rpc.cluster_secret import ClusterSecret
from kv_transfer.transport import PeerDisconnected, TransportEvent
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.carrier import Carrier
from kv_transfer.transports.pair.channel import Channel, Frame, Kind
from kv_transfer.transports.pair.dialling import Connector, Dial, End, PendingPeer
from kv_transfer.transports.pair.ends import Expect, Inbound, Link, Outbound, Push
from kv_transfer.transports.pair.listener import Listener
from kv_transfer.transports.pair.messages import Messages
from kv_transfer.transports.pair.poller import ChannelPoller
from kv_transfer.transports.threaded import resolve

_UNCLAIMED = 256
"""The most unclaimed connections. Their peers are unknown, or dialled slightly before `connect` named them."""


class Links:
    """Transport's thread only, except `is_open`. `ends` waits for the listener too."""

    def __init__(
        self,
        here: PairAddress,
        listener: Listener,
        ends: ChannelPoller[End],
        carrier: Carrier,
        messages: Messages,
        emit: Callable[[TransportEvent], None],
        secret: ClusterSecret | None,
    ) -> None:
        self._listener = listener
        self._ends = ends
        self._connector = Connector(here, listener, ends, self._open, self._give_up, self._take_in, secret)
        self._carrier = carrier
        self._messages = messages
        self._emit = emit
        self._links: dict[str, Link] = {}
        self._unclaimed: dict[str, Inbound] = {}  # by id of the peer, which `connect` has not named yet
        self._leaving: list[Outbound | Inbound] = []
        self._left_at = 0.0

    # ---- any thread ----

    def is_open(self, peer: str) -> bool:
        """Whether the connection for pushes to the peer is open."""
        link = self._links.get(peer)
        return link is not None and link.out is not None

    # ---- what is under way ----

    @property
    def is_busy(self) -> bool:
        return self.is_leaving or any(link.is_busy for link in self._links.values())

    @property
    def is_urgent(self) -> bool:
        return any(link.is_urgent for link in self._links.values())

    @property
    def is_leaving(self) -> bool:
        """Whether a connection of an ended link still has operations under way."""
        return bool(self._leaving)

    @property
    def moved_at(self) -> float:
        """When anything last made progress."""
        return max(self._left_at, self._messages.moved_at)

    def collect(self) -> None:
        """Report operations that are over, and close connections that are."""
        for link in list(self._links.values()):
            self._or_drop(link, self._messages.collect)
        for end in [end for end in self._leaving if end.is_over]:
            self._leaving.remove(end)
            (end.sending if isinstance(end, Outbound) else end.receiving).close()
            self._ends.close(end)
        self._messages.report_failed()

    # ---- commands ----

    def connect(self, peer: str, address: bytes, theirs: PairAddress, up: Future[None]) -> None:
        """Resolve `up` once the peer can be reached."""
        link = self._links.get(peer)
        if link is None:
            self._open_link(Link(peer, address, theirs, [up]))
        elif link.address != address:
            resolve(up, TransferError(f"{peer} is connected at another address"))
        elif link.out is not None:
            resolve(up, None)
        else:
            link.waiting.append(up)

    def disconnect(self, peer: str) -> None:
        if link := self._links.get(peer):
            self._drop(link, "disconnected", requested=True)

    def submit(self, peer: str, operation: Push | Expect) -> None:
        if (link := self._links.get(peer)) is None:
            self._messages.refuse(peer, operation, "not connected")
            return
        self._or_drop(link, self._messages.submit, operation)

    def leave(self, reason: str, requested: bool) -> None:
        """End all links; operations under way keep their connections. `requested`: by this end."""
        for link in list(self._links.values()):
            self._drop(link, reason, requested)
        while self._unclaimed:
            self._leave(self._unclaimed.popitem()[1])

    # ---- opened ----

    def _open_link(self, link: Link) -> None:
        self._links[link.peer] = link
        self._connector.dial(link)
        if self._links.get(link.peer) is not link:
            return  # no address can be dialled; an unclaimed connection waits for the next link
        if inward := self._unclaimed.pop(link.remote, None):
            self._attach(link, inward)

    def _give_up(self, link: Link, reason: str) -> None:
        self._drop(link, reason, requested=True)

    def _open(self, link: Link, channel: Channel) -> None:
        """The peer was reached: pushes use this connection."""
        memory = bytes.fromhex(link.theirs.memory)
        try:
            sending = self._carrier.sending(link.remote, memory, lambda note: channel.send(Kind.NOTE, payload=note))
        except TransferError as error:
            channel.send(Kind.BYE)
            self._drop(link, error.message, requested=True)
            return
        link.out = Outbound(channel, sending)
        self._ends.put(link.out)
        for up in link.waiting:
            resolve(up, None)
        link.waiting = []

    def _take_in(self, remote: str, channel: Channel, host: str) -> None:
        """The peer has dialled. A connection that it dialled earlier is superseded and ends."""
        inward = Inbound(channel, self._carrier.receiving(remote, host), remote)
        self._ends.put(inward)
        if (link := self._link_to(remote)) is not None and link.inward is not None:
            self._attend(link.inward)  # its end of stream may have arrived already
        if (link := self._link_to(remote)) is not None and link.inward is not None:
            if any(expect.granted for expect in link.expects.values()):
                self._drop(link, "the peer connected anew", requested=False)
            else:
                self._leave(link.inward)
        link = self._link_to(remote)
        if link is not None:
            self._attach(link, inward)
            return
        if before := self._unclaimed.pop(remote, None):
            self._leave(before)
        self._unclaimed[remote] = inward
        if len(self._unclaimed) > _UNCLAIMED:
            self._leave(self._unclaimed.pop(next(iter(self._unclaimed))))

    def _attach(self, link: Link, inward: Inbound) -> None:
        link.inward = inward
        self._or_drop(link, self._messages.grant, inward)

    def _link_to(self, remote: str) -> Link | None:
        return next((link for link in self._links.values() if link.remote == remote), None)

    def _link_of(self, end: Outbound | Inbound) -> Link | None:
        return next((link for link in self._links.values() if end in (link.out, link.inward)), None)

    # ---- received ----

    def attend(self, descriptor: int) -> None:
        """A peer dials, or a connection is ready."""
        if descriptor == self._listener.fileno():
            self._connector.accept()
        elif end := self._ends.at(descriptor):
            self._attend(end)

    def _attend(self, end: End) -> None:
        """Read from the connection, and write to it, as far as it is ready."""
        channel, descriptor = end.channel, end.channel.fileno()
        if isinstance(end, Dial) and channel.dialling:
            self._connector.answered(end)
            return
        channel.flush()
        for frame in channel.receive():
            now = self._ends.at(descriptor)  # the previous frame may have replaced or closed the end
            if now is not None and now.channel is channel:
                self._handle(now, frame)
        now = self._ends.at(descriptor)
        if channel.lost and now is not None and now.channel is channel:
            self._lose(now)

    def _handle(self, end: End, frame: Frame) -> None:
        match end, frame.kind:
            case ((Dial() | PendingPeer()), _):
                self._connector.handle(end, frame)
            case Outbound(), Kind.GRANT:
                if link := self._link_of(end):
                    self._or_drop(link, self._messages.take_grant, end, frame)
            case Inbound(), Kind.STRAY:
                if link := self._link_of(end):
                    self._drop(link, "the peer is gone", requested=False)
            case Inbound(), Kind.BYE:
                end.said_bye = True
                self._part_with(end)
            case Inbound(), Kind.NOTE:
                try:
                    end.receiving.handle_note(frame.payload)
                except TransferError:
                    end.channel.lost = True
            case Inbound(), Kind.BEGIN | Kind.END | Kind.LONG:
                if link := self._link_of(end):
                    self._or_drop(link, self._messages.handle, end, frame)
            case _:
                end.channel.lost = True  # a protocol violation

    def _lose(self, end: End) -> None:
        if isinstance(end, Dial | PendingPeer):
            self._connector.lose(end)
            return
        if isinstance(end, Inbound):
            if not end.broke_at:
                end.end()
            self._part_with(end)
            return
        if (link := self._link_of(end)) and link.inward is not None:
            self._attend(link.inward)  # what the peer sent and completed before it died counts
        if link := self._link_of(end):
            self._drop(link, "the peer is gone", requested=False)

    # ---- left ----

    def _part_with(self, inward: Inbound) -> None:
        """The peer sends nothing more on this connection. That ends the link if a message may have begun. Else the
        connection belonged to an earlier link that the peer dropped: it dials again, or its other connection ends
        too."""
        link = self._link_of(inward)
        if link is None:
            if self._unclaimed.get(inward.remote) is inward:
                del self._unclaimed[inward.remote]
                self._leave(inward)
            return
        if any(e.begun or (e.granted and not inward.said_bye) for e in link.expects.values()):
            self._drop(link, "the peer is gone", requested=False)
            return
        link.inward = None
        for expect in link.expects.values():
            expect.granted = False
        self._leave(inward)

    def _or_drop(self, link: Link, act: Callable[..., None], *args: object) -> None:
        """Call `act`. If it fails, the link ends, since no carrier can continue after a failure."""
        try:
            act(link, *args)
        except TransferError as error:
            self._drop(link, error.message, requested=False)

    def _drop(self, link: Link, reason: str, requested: bool) -> None:
        """End all operations with the peer. `requested`: by this end, so no PeerDisconnected."""
        if self._links.get(link.peer) is not link:
            return
        del self._links[link.peer]
        self._connector.give_up(link)
        self._messages.cut(link)
        for end in (link.out, link.inward):
            if end is not None:
                self._leave(end)
        self._messages.fail(link, reason)
        connecting = bool(link.waiting)
        for up in link.waiting:
            resolve(up, TransferError(f"{link.peer} cannot be reached: {reason}"))
        if not requested and not connecting:
            self._emit(PeerDisconnected(link.peer, reason))

    def _leave(self, end: Outbound | Inbound) -> None:
        """Keep the connection until its operations are over: a pusher then closes it, for which a receiver waits."""
        self._left_at = time.monotonic()
        if isinstance(end, Outbound):
            end.channel.send(Kind.BYE)
            end.sending.abort()
        else:
            end.channel.hang_up()
            end.receiving.abort()
            if end.channel.lost and not end.broke_at:
                end.end()
        self._leaving.append(end)
