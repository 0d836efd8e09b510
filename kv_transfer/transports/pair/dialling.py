"""How two transports connect: one dials all addresses of the other at once, and uses the first connection that answers.

With a cluster secret, HELLO and WELCOME carry nonces, and OPEN and PROOF prove that each end knows the secret
(`baton.rpc.cluster_secret`). Until then, a connection belongs to no link.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from baton.rpc.cluster_secret import DATA, NONCE_BYTES, ClusterSecret, Proofs, is_proof, new_nonce
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.channel import Channel, Frame, Kind
from kv_transfer.transports.pair.ends import Inbound, Link, Outbound
from kv_transfer.transports.pair.listener import Listener
from kv_transfer.transports.pair.poller import ChannelPoller

_STRANGERS = 64
_ID_BYTES = 32
_NO_ANSWER = "none of its addresses answers"


@dataclass(eq=False, slots=True)
class Dial:
    """A connection attempt to one of the peer's addresses. `proofs`: both ends', once the peer has sent its nonce."""

    channel: Channel
    link: Link
    nonce: bytes
    proofs: Proofs | None = None


@dataclass(eq=False, slots=True)
class PendingPeer:
    """An accepted connection that the peer has not opened yet. `proofs`: both ends', once the peer has sent HELLO."""

    channel: Channel
    host: str
    remote: str = ""
    proofs: Proofs | None = None


End = Dial | PendingPeer | Outbound | Inbound


class Connector:
    """Transport's thread only. Reports results by callbacks: `opened(link, channel)` or `failed(link, reason)` for a
    peer that is dialled, `called(remote, channel, host)` for one that dials."""

    def __init__(
        self,
        here: PairAddress,
        listener: Listener,
        ends: ChannelPoller[End],
        opened: Callable[[Link, Channel], None],
        failed: Callable[[Link, str], None],
        called: Callable[[str, Channel, str], None],
        secret: ClusterSecret | None,
    ) -> None:
        self._here = here
        self._listener = listener
        self._ends = ends
        self._opened, self._failed, self._called = opened, failed, called
        self._secret = secret
        self._bound = listener.host

    def dial(self, link: Link) -> None:
        for host in link.theirs.reachable_from(self._here):
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
            with contextlib.suppress(OSError):  # a family that this machine lacks
                channel = Channel(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), dialling=True)
                dial = Dial(channel, link, self._nonce())
                self._ends.put(dial)
                if not ipaddress.ip_address(self._bound).is_unspecified:
                    channel.socket.bind((self._bound, 0))  # the peer may look for a carrier's services at this address
                if channel.socket.connect_ex((host, link.theirs.port)) not in (0, errno.EINPROGRESS):
                    self._ends.close(dial)
        self._fail_if_unreachable(link, _NO_ANSWER)

    def give_up(self, link: Link) -> None:
        """Stop dialling it."""
        for dial in self._dials(link):
            self._ends.close(dial)

    def accept(self) -> None:
        if (accepted := self._listener.accept()) is not None:
            connection, host = accepted
            with contextlib.suppress(OSError):  # the connection is broken already
                self._ends.put(PendingPeer(Channel(connection), host))
        for end in self._ends.of(PendingPeer)[:-_STRANGERS]:
            self._ends.close(end)

    def answered(self, dial: Dial) -> None:
        """The attempt is over, and the address is reachable or not."""
        channel = dial.channel
        if error := channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.lose(dial, os.strerror(error))
            return
        channel.dialling = False
        channel.send(Kind.HELLO, payload=(dial.link.remote + self._here.id).encode() + dial.nonce)

    def lose(self, end: Dial | PendingPeer, reason: str = _NO_ANSWER) -> None:
        self._ends.close(end)
        if isinstance(end, Dial):
            self._fail_if_unreachable(end.link, reason)

    def handle(self, end: Dial | PendingPeer, frame: Frame) -> None:
        match end, frame.kind:
            case Dial(proofs=None), Kind.WELCOME if len(frame.payload) == len(end.nonce):
                for other in self._dials(end.link):
                    if other is not end:
                        self._ends.close(other)
                end.proofs = self._proofs(self._here.id, end.link.remote, end.nonce, frame.payload)
                end.channel.send(Kind.OPEN, payload=end.proofs.caller)
                if self._secret is None:
                    self._opened(end.link, end.channel)
            case Dial(proofs=Proofs(callee=proof)), Kind.PROOF if proof and is_proof(frame.payload, proof):
                self._opened(end.link, end.channel)
            case PendingPeer(remote=""), Kind.HELLO if self._is_meant(frame.payload):
                end.remote, nonce = frame.payload[_ID_BYTES : 2 * _ID_BYTES].decode(), self._nonce()
                end.proofs = self._proofs(end.remote, self._here.id, frame.payload[2 * _ID_BYTES :], nonce)
                end.channel.send(Kind.WELCOME, payload=nonce)
            case PendingPeer(proofs=Proofs() as proofs), Kind.OPEN if is_proof(frame.payload, proofs.caller):
                if self._secret is not None:
                    end.channel.send(Kind.PROOF, payload=proofs.callee)
                self._called(end.remote, end.channel, end.host)
            case _:
                self.lose(end, "another process listens there, or the cluster secret differs")

    def _nonce(self) -> bytes:
        """Empty without a secret, like the proofs."""
        return b"" if self._secret is None else new_nonce()

    def _proofs(self, caller: str, callee: str, *nonces: bytes) -> Proofs:
        return Proofs(b"", b"") if self._secret is None else self._secret.proofs(DATA, caller, callee, *nonces)

    def _is_meant(self, hello: bytes) -> bool:
        """Whether the HELLO is for this process, and includes a nonce exactly if there is a secret here."""
        num_bytes = 2 * _ID_BYTES + (0 if self._secret is None else NONCE_BYTES)
        whom, who = hello[:_ID_BYTES], hello[_ID_BYTES : 2 * _ID_BYTES]
        return len(hello) == num_bytes and whom == self._here.id.encode() and who.isalnum()

    def _dials(self, link: Link) -> list[Dial]:
        return [dial for dial in self._ends.of(Dial) if dial.link is link]

    def _fail_if_unreachable(self, link: Link, reason: str) -> None:
        if link.out is None and not self._dials(link):
            self._failed(link, reason)
