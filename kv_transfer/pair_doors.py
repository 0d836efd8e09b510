"""How two transports meet: one dials all addresses of the other at once, and opens the first that answers."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.channel import Channel, Frame, Kind
from kv_transfer.pair_address import PairAddress
from kv_transfer.pair_ends import Inbound, Link, Outbound
from kv_transfer.pair_poll import Ends

_STRANGERS = 64
_ID_BYTES = 32
_NO_ANSWER = "none of its addresses answers"


@dataclass(eq=False, slots=True)
class Dial:
    """One of the peer's addresses being tried."""

    channel: Channel
    link: Link


@dataclass(eq=False, slots=True)
class Greeting:
    """Somebody who called, and has not opened the connection yet."""

    channel: Channel
    host: str
    remote: str = ""


End = Dial | Greeting | Outbound | Inbound


class Doors:
    """Transport's thread only. What becomes of it is told: `opened(link, channel)` or `failed(link, reason)` for who is
    dialled, `called(remote, channel, host)` for who dials."""

    def __init__(
        self,
        here: PairAddress,
        listener: socket.socket,
        ends: Ends[End],
        opened: Callable[[Link, Channel], None],
        failed: Callable[[Link, str], None],
        called: Callable[[str, Channel, str], None],
    ) -> None:
        self._here = here
        self._listener = listener
        self._ends = ends
        self._opened, self._failed, self._called = opened, failed, called

    def dial(self, link: Link) -> None:
        for host in link.theirs.reachable_from(self._here):
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
            with contextlib.suppress(OSError):  # a family that this machine lacks
                channel = Channel(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), dialling=True)
                dial = Dial(channel, link)
                self._ends.put(dial)
                if channel.socket.connect_ex((host, link.theirs.port)) not in (0, errno.EINPROGRESS):
                    self._ends.close(dial)
        self._fail_if_vain(link, _NO_ANSWER)

    def give_up(self, link: Link) -> None:
        """Dial it no more."""
        for dial in self._dials(link):
            self._ends.close(dial)

    def accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection, (host, *_) = self._listener.accept()
            self._ends.put(Greeting(Channel(connection), host.removeprefix("::ffff:")))
        for end in self._ends.of(Greeting)[:-_STRANGERS]:
            self._ends.close(end)

    def answered(self, dial: Dial) -> None:
        """The address is reachable, or not."""
        channel = dial.channel
        if error := channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.lose(dial, os.strerror(error))
            return
        channel.dialling = False
        channel.send(Kind.HELLO, payload=(dial.link.remote + self._here.id).encode())

    def lose(self, end: Dial | Greeting, reason: str = _NO_ANSWER) -> None:
        self._ends.close(end)
        if isinstance(end, Dial):
            self._fail_if_vain(end.link, reason)

    def hear(self, end: Dial | Greeting, frame: Frame) -> None:
        match end, frame.kind:
            case Dial(), Kind.WELCOME:
                for other in self._dials(end.link):
                    if other is not end:
                        self._ends.close(other)
                end.channel.send(Kind.OPEN)
                self._opened(end.link, end.channel)
            case Greeting(), Kind.HELLO if frame.payload[:_ID_BYTES] == self._here.id.encode():
                end.remote = frame.payload[_ID_BYTES:].decode(errors="replace")
                end.channel.send(Kind.WELCOME)
            case Greeting(), Kind.OPEN if end.remote:
                self._called(end.remote, end.channel, end.host)
            case _:
                self.lose(end, "another process listens there")

    def _dials(self, link: Link) -> list[Dial]:
        return [dial for dial in self._ends.of(Dial) if dial.link is link]

    def _fail_if_vain(self, link: Link, reason: str) -> None:
        if link.out is None and not self._dials(link):
            self._failed(link, reason)
