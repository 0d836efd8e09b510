"""How processes of several hosts meet: one listens, the others come, say who they are and what they serve, and are told
why they are refused, or what they need to go on.

As between torch's processes, nothing is authenticated here: the network among these processes must be their own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from baton.address import HostPort
from node.errors import StartupError
from node.peers.links import PeerLink

log = logging.getLogger(__name__)

RETRY_S = 0.1
GREETING_S = 5.0
"""What one that comes has to say hello."""
MAX_COMING = 64
"""Connections on which nobody has said hello yet: of more, the oldest is closed. Those that belong here say it at once.
"""
_MAX_SHOWN = 200
"""Characters of what a stranger says."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where they meet, the flags that name its host and its port, and what those who come are called."""

    at: HostPort
    address_flag: str
    port_flag: str
    guest: str

    def listen(self) -> socket.socket:
        """Raises StartupError."""
        try:
            return socket.create_server((self.at.host, self.at.port), family=family(self.at.host))
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            flag = self.port_flag if is_taken else self.address_flag
            raise StartupError(f"{flag}: cannot listen on {self.at}: {error.strerror}") from error


WhyNot = Callable[[dict[str, Any]], str | None]
"""Why the one that says this is refused. May raise KeyError, TypeError, ValueError or AttributeError for nonsense."""


class Greeter:
    """Listens, and lets in those that say hello, whoever else comes and says nothing. Owns the connections on which
    nobody has said hello yet. Raises StartupError if it cannot listen.

        wait, beside links that are the caller's  ->  greet: those that have said hello, one after another
    """

    def __init__(
        self, place: Place, why_not: WhyNot, *, timeout_s: float = GREETING_S, max_coming: int = MAX_COMING
    ) -> None:
        self._place, self._why_not = place, why_not
        self._timeout_s, self._max_coming = timeout_s, max_coming
        self._listener = place.listen()
        self._coming: dict[PeerLink, float] = {}
        """With the time by which each has to say hello, the oldest first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.close()
        for link in self._coming:
            link.close()

    @property
    def host(self) -> str:
        """The address at which it listens."""
        return str(self._listener.getsockname()[0])

    def wait(self, links: Iterable[PeerLink], timeout_s: float) -> Sequence[PeerLink | socket.socket]:
        """What can be read of these links, and for `greet`, after that time at the latest, or earlier."""
        left_s = min(self._coming.values(), default=math.inf) - time.monotonic()
        waited: list[PeerLink | socket.socket] = [self._listener, *self._coming, *links]
        return select.select(waited, [], [], max(0.0, min(timeout_s, left_s)))[0]

    def greet(self, ready: Sequence[PeerLink | socket.socket]) -> Iterator[tuple[dict[str, Any], PeerLink]]:
        """Of what is ready, what each says that is one of ours, and the link to it, which is the caller's from then on.
        The next one is judged when the caller goes on. All others are told why, or let go."""
        for link in [link for link in self._coming if link in ready]:
            if (said := self._hello(link)) is not None:
                yield said, link
        now = time.monotonic()
        for link in [link for link, deadline in self._coming.items() if deadline < now]:
            self._let_go(link, TimeoutError(f"it has not said hello for {self._timeout_s:g} s"))
        if self._listener in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            link = PeerLink(self._listener.accept()[0])
        except OSError as error:  # it has ended already
            return self._log(error)
        self._coming[link] = time.monotonic() + self._timeout_s
        if len(self._coming) > self._max_coming:
            self._let_go(next(iter(self._coming)), OSError("too many others come"))
        return None

    def _hello(self, link: PeerLink) -> dict[str, Any] | None:
        try:
            if (said := link.receive_first()) is None:
                return None
            why = self._why_not(said)
            if why is not None:
                log.warning("a %s was refused: %s", self._place.guest, why)
                link.send(refused=why)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._let_go(link, error)
            return None
        del self._coming[link]
        if why is None:
            return said
        link.close()
        return None

    def _let_go(self, link: PeerLink, error: Exception) -> None:
        self._log(error)
        del self._coming[link]
        link.close()

    def _log(self, error: Exception) -> None:
        log.warning("what came to %s was no %s: %r", self._place.port_flag, self._place.guest, error)


def number_in(said: Mapping[str, Any], name: str) -> int:
    """Raises KeyError, or TypeError for all but an integer: JSON as Python reads it has Infinity and NaN, too."""
    if type(said[name]) is not int:
        raise TypeError(f"{name} is no integer")
    return int(said[name])


def why_not_alike(serves: Mapping[str, Any], own: Mapping[str, str], who: str) -> str | None:
    """The first flag in which they differ. serves: as it came. who: has what is ours. Raises AttributeError or
    TypeError for nonsense."""
    flag = next((flag for flag in own if own[flag] != serves.get(flag)), None)
    if flag is None:
        return None
    if not isinstance(theirs := serves.get(flag), str | None):
        raise TypeError(f"{flag} is no text")
    return f"{flag}: {theirs and theirs[:_MAX_SHOWN]}, and {who} has {own[flag]}"


def come(
    place: Place,
    hello: Mapping[str, Any],
    timeout_s: float,
    *,
    answer_s: float | None = None,
) -> tuple[PeerLink, dict[str, Any]]:
    """Come to the one that listens, perhaps later, and say hello; the link, and the answer. answer_s: how long that may
    take; None: the time that is left. Raises StartupError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link = PeerLink(socket.create_connection((place.at.host, place.at.port), timeout=GREETING_S))
            with closed_on_error(link):
                link.send(**hello)
                left_s = max(0.0, deadline - time.monotonic())
                said = link.receive_one(left_s if answer_s is None else answer_s)
                if "refused" in said:
                    raise StartupError(str(said["refused"]))
                return link, said
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                why = f"{place.address_flag}: could not reach {place.at} within {timeout_s:g} s: {error}"
                raise StartupError(why) from error
            time.sleep(RETRY_S)


@contextlib.contextmanager
def closed_on_error(link: PeerLink) -> Iterator[None]:
    try:
        yield
    except BaseException:
        link.close()
        raise


def family(host: str) -> socket.AddressFamily:
    """Raises OSError for a name without an address."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def own_host(to: HostPort) -> str:
    """This machine's address on the way to that one."""
    kind, _, _, _, address = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
