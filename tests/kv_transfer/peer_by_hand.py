"""A peer of a transport whose frames the test sends and hears itself."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

from baton.errors import TransferError
from baton.rpc.cluster_secret import DATA, ClusterSecret, new_nonce
from kv_transfer import staging_for
from kv_transfer.staging import Staging
from kv_transfer.transports.carriers.ipc import IpcTransport
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.channel import Channel, Frame, Kind
from kv_transfer.transports.pair.ends import Inbound
from kv_transfer.transports.pair.transport import PairTransport
from tests.kv_transfer.ordered import ordered_carrier
from tests.kv_transfer.rig_node import DEADLINE_S

SLOT_BYTES = 4096


class Peer:
    """The other end of both connections with a transport, by hand."""

    def __init__(self, transport: PairTransport, secret: ClusterSecret | None = None) -> None:
        self.theirs = PairAddress.unpack(transport.info(), "it")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(DEADLINE_S)
        port = self.listener.getsockname()[1]
        self.address = replace(self.theirs, id="e" * 32, port=port)
        self._secret = secret
        self._transport = transport
        self.channels: list[Channel] = []

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.listener.close()

    def call(self) -> Channel:
        """Dial it, as who pushes does."""
        nonce = new_nonce() if self._secret else b""
        channel = self._keep(socket.create_connection(("127.0.0.1", self.theirs.port), timeout=DEADLINE_S))
        channel.send(Kind.HELLO, payload=(self.theirs.id + self.address.id).encode() + nonce)
        welcome = self.hear(channel)
        assert welcome.kind is Kind.WELCOME
        if self._secret is None:
            channel.send(Kind.OPEN)
            return channel
        proofs = self._secret.proofs(DATA, self.address.id, self.theirs.id, nonce, welcome.payload)
        channel.send(Kind.OPEN, payload=proofs.caller)
        assert self.hear(channel) == Frame(Kind.PROOF, payload=proofs.callee)
        return channel

    def answer(self, name: str) -> Channel:
        """Be connected to under that name, as who grants is."""
        errors: list[Exception] = []

        def connect() -> None:
            try:
                self._transport.connect(name, self.address.pack())
            except TransferError as error:
                errors.append(error)

        connecting = threading.Thread(target=connect)
        connecting.start()
        channel = self._keep(self.listener.accept()[0])
        hello, nonce = self.hear(channel), new_nonce() if self._secret else b""
        assert hello.payload[:64] == (self.address.id + self.theirs.id).encode()
        channel.send(Kind.WELCOME, payload=nonce)
        said = self.hear(channel)
        assert said.kind is Kind.OPEN
        if self._secret is not None:
            proofs = self._secret.proofs(DATA, self.theirs.id, self.address.id, hello.payload[64:], nonce)
            assert said.payload == proofs.caller
            channel.send(Kind.PROOF, payload=proofs.callee)
        connecting.join(DEADLINE_S)
        assert errors == []
        return channel

    def hear(self, channel: Channel) -> Frame:
        return next(frame for frame in self.until_lost(channel) if frame is not None)

    def until_lost(self, channel: Channel) -> Iterator[Frame]:
        arrivals = select.poll()
        arrivals.register(channel, select.POLLIN)
        while not channel.lost:
            assert arrivals.poll(DEADLINE_S * 1e3), "it was not hung up on"
            yield from channel.receive()

    def _keep(self, connection: socket.socket) -> Channel:
        channel = Channel(connection)
        self.channels.append(channel)
        return channel


def transport_of(kind: str, secret: ClusterSecret | None = None) -> tuple[PairTransport, Staging]:
    if kind == "ipc":
        staging = staging_for("ipc", 4, SLOT_BYTES, "cpu")
        return IpcTransport(staging, lambda: None, secret=secret), staging
    staging = Staging(4, SLOT_BYTES, "cpu")
    return PairTransport(staging, lambda: None, ordered_carrier(), secret=secret), staging


def is_well(transport: PairTransport, secret: ClusterSecret | None = None) -> None:
    """Its thread lives, and takes whoever comes next."""
    transport.poll()
    peer = Peer(transport, secret)
    peer.call()
    peer.answer("next")
    transport.disconnect("next")
    peer.close()


def inbound(transport: PairTransport) -> list[Inbound]:
    """The connections that it has not closed, after the turn in which it is now."""
    found = Future[list[Inbound]]()
    transport._pair.call(lambda: found.set_result(transport._pair._ends.of(Inbound)))
    return found.result(DEADLINE_S)


def connecting(transport: PairTransport, peer: Peer) -> Future[None]:
    """A call of `connect`, which the peer's listener answers or not."""
    done = Future[None]()

    def connect() -> None:
        try:
            transport.connect("peer", peer.address.pack())
        except TransferError as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=connect).start()
    return done


def hung_up(peer: Peer, channel: Channel) -> None:
    """Nothing comes on the channel, and it ends."""
    assert list(peer.until_lost(channel)) == []
