"""How processes of several hosts meet: one listens, the others come, say who they are and what they serve, and are told
why they are refused, or what they need to go on.

As between torch's processes, nothing is authenticated here: the network among these processes must be their own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.address import HostPort
from node.errors import StartupError
from node.peer_links import PeerLink

log = logging.getLogger(__name__)

RETRY_S = 0.1
GREETING_S = 5.0


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


def greet(listener: socket.socket, place: Place, why_not: WhyNot) -> tuple[dict[str, Any], PeerLink] | None:
    """Take in one that has come: what it says, and the link to it; None: it is refused, or nobody of ours."""
    try:
        link = PeerLink(listener.accept()[0])
        with closed_on_error(link):
            said = link.receive_one(GREETING_S)
            if (why := why_not(said)) is None:
                return said, link
            log.warning("a %s was refused: %s", place.guest, why)
            link.send(refused=why)
            link.close()
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("what came to %s was no %s: %r", place.port_flag, place.guest, error)
    return None


def why_not_alike(serves: Mapping[str, str], own: Mapping[str, str], who: str) -> str | None:
    """The first flag in which they differ. who: has what is ours."""
    flag = next((flag for flag in own if own[flag] != serves.get(flag)), None)
    return flag and f"{flag}: {serves.get(flag)}, and {who} has {own[flag]}"


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
                why = f"{place.address_flag}: not all nodes have come to {place.at} for {timeout_s:g} s: {error}"
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
