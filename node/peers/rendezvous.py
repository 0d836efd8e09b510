"""How processes on several hosts find each other: one listens, the others connect and send a hello, which says who they
are and what they serve; the answer is what they need to go on, or why they are refused.

As with torch.distributed, nothing is authenticated here: the network among these processes must be closed to others.
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
HELLO_TIMEOUT_S = 5.0
"""How long a new connection may take to send its hello."""
MAX_PENDING = 64
"""The most connections without a hello: of more, the oldest is closed. Peers send their hello at once."""
_MAX_SHOWN = 200
"""The most characters that are shown of what a peer sent."""


@dataclass(frozen=True, slots=True)
class RendezvousEndpoint:
    """The address at which one process listens for the others, the flags that set its host and its port, and what the
    others are called in messages."""

    address: HostPort
    address_flag: str
    port_flag: str
    peer_kind: str

    def listen(self) -> socket.socket:
        """Raises StartupError."""
        try:
            return socket.create_server(
                (self.address.host, self.address.port), family=address_family(self.address.host)
            )
        except OSError as error:
            is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            flag = self.port_flag if is_taken else self.address_flag
            raise StartupError(f"{flag}: cannot listen on {self.address}: {error.strerror}") from error


CheckHello = Callable[[dict[str, Any]], str | None]
"""Returns why the peer with this hello is refused; None: it is admitted. May raise KeyError, TypeError, ValueError or
AttributeError for a malformed hello."""


class RendezvousServer:
    """Listens, and admits the peers whose hello passes `check_hello`. A connection that stays silent holds up no other.
    Owns the connections that have not sent their hello yet. Raises StartupError if it cannot listen.

        wait (also for links of the caller)  ->  admit: the peers whose hello has arrived, one after another
    """

    def __init__(
        self,
        endpoint: RendezvousEndpoint,
        check_hello: CheckHello,
        *,
        timeout_s: float = HELLO_TIMEOUT_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._endpoint, self._check_hello = endpoint, check_hello
        self._timeout_s, self._max_pending = timeout_s, max_pending
        self._listener = endpoint.listen()
        self._pending: dict[PeerLink, float] = {}
        """With the time by which each has to send its hello, the oldest first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.close()
        for link in self._pending:
            link.close()

    @property
    def host(self) -> str:
        """The address at which it listens."""
        return str(self._listener.getsockname()[0])

    def wait(self, links: Iterable[PeerLink], timeout_s: float) -> Sequence[PeerLink | socket.socket]:
        """Wait until `admit` has something to do, or one of these links can be read, but no longer than `timeout_s`.
        Returns what is ready, for `admit`."""
        left_s = min(self._pending.values(), default=math.inf) - time.monotonic()
        waited: list[PeerLink | socket.socket] = [self._listener, *self._pending, *links]
        return select.select(waited, [], [], max(0.0, min(timeout_s, left_s)))[0]

    def admit(self, ready: Sequence[PeerLink | socket.socket]) -> Iterator[tuple[dict[str, Any], PeerLink]]:
        """The hello of each admitted peer and the link to it, which the caller owns from then on. The next hello is
        checked when the caller goes on. Other peers are told why they are refused, or are disconnected."""
        for link in [link for link in self._pending if link in ready]:
            if (hello := self._read_hello(link)) is not None:
                yield hello, link
        now = time.monotonic()
        for link in [link for link, deadline in self._pending.items() if deadline < now]:
            self._drop(link, TimeoutError(f"it has not said hello for {self._timeout_s:g} s"))
        if self._listener in ready:
            self._accept()

    def _accept(self) -> None:
        try:
            link = PeerLink(self._listener.accept()[0])
        except OSError as error:  # it has ended already
            return self._log(error)
        self._pending[link] = time.monotonic() + self._timeout_s
        if len(self._pending) > self._max_pending:
            self._drop(next(iter(self._pending)), OSError("too many others come"))
        return None

    def _read_hello(self, link: PeerLink) -> dict[str, Any] | None:
        """The hello of a peer that is admitted; None: it is refused, or has not arrived as a whole."""
        try:
            if (hello := link.receive_first()) is None:
                return None
            refusal = self._check_hello(hello)
            if refusal is not None:
                log.warning("a %s was refused: %s", self._endpoint.peer_kind, refusal)
                link.send(refused=refusal)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            self._drop(link, error)
            return None
        del self._pending[link]
        if refusal is None:
            return hello
        link.close()
        return None

    def _drop(self, link: PeerLink, error: Exception) -> None:
        self._log(error)
        del self._pending[link]
        link.close()

    def _log(self, error: Exception) -> None:
        log.warning("what came to %s was no %s: %r", self._endpoint.port_flag, self._endpoint.peer_kind, error)


def int_field(message: Mapping[str, Any], name: str) -> int:
    """Raises KeyError, or TypeError for all but an integer: JSON as Python reads it has Infinity and NaN, too."""
    if type(message[name]) is not int:
        raise TypeError(f"{name} is no integer")
    return int(message[name])


def mismatch(theirs: Mapping[str, Any], own: Mapping[str, str], owner: str) -> str | None:
    """The first flag whose values differ, as a line for people. theirs: as it was received. owner: the process whose
    flags `own` are. Raises AttributeError or TypeError for a malformed value."""
    flag = next((flag for flag in own if own[flag] != theirs.get(flag)), None)
    if flag is None:
        return None
    if not isinstance(value := theirs.get(flag), str | None):
        raise TypeError(f"{flag} is no text")
    return f"{flag}: {value and value[:_MAX_SHOWN]}, and {owner} has {own[flag]}"


def join_rendezvous(
    endpoint: RendezvousEndpoint,
    hello: Mapping[str, Any],
    timeout_s: float,
    *,
    answer_s: float | None = None,
) -> tuple[PeerLink, dict[str, Any]]:
    """Connect to the process that listens, which may start later, and send the hello. Returns the link and the answer.
    answer_s: how long that may take; None: the time that is left. Raises StartupError."""
    deadline = time.monotonic() + timeout_s
    address = endpoint.address
    while True:
        try:
            link = PeerLink(socket.create_connection((address.host, address.port), timeout=HELLO_TIMEOUT_S))
            with closed_on_error(link):
                link.send(**hello)
                left_s = max(0.0, deadline - time.monotonic())
                answer = link.receive_one(left_s if answer_s is None else answer_s)
                if "refused" in answer:
                    raise StartupError(str(answer["refused"]))
                return link, answer
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                why = f"{endpoint.address_flag}: could not reach {address} within {timeout_s:g} s: {error}"
                raise StartupError(why) from error
            time.sleep(RETRY_S)


@contextlib.contextmanager
def closed_on_error(link: PeerLink) -> Iterator[None]:
    try:
        yield
    except BaseException:
        link.close()
        raise


def address_family(host: str) -> socket.AddressFamily:
    """Raises OSError for a name without an address."""
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def own_host(to: HostPort) -> str:
    """This machine's address on the route to that one."""
    kind, _, _, _, address = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
