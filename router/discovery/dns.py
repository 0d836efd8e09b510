"""A DNS name that stands for many nodes, as a headless service of Kubernetes does: each address is a node."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable

from baton.address import HostPort
from baton.node_info import NodeRole
from router.discovery.source import Found, Member

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 10.0

Resolve = Callable[[str], Awaitable[Iterable[str]]]
"""All addresses of a name, IPv4 and IPv6. Raises OSError."""


async def resolve(name: str) -> set[str]:
    """With the system's resolver. A name without addresses is an OSError.

    Each lookup has a thread that nobody waits for at the end: without an answer from a name server it takes minutes,
    and so would the end of the process, as event loops wait for their own threads.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[set[str]] = loop.create_future()

    def tell(addresses: set[str], error: OSError | None) -> None:
        if found.done():
            return  # too late
        if error is None:
            found.set_result(addresses)
        else:
            found.set_exception(error)

    def look_up() -> None:
        addresses, error = set[str](), None
        try:
            answer = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = {str(address[0]) for *_, address in answer}
        except OSError as failed:
            error = failed
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, addresses, error)

    try:
        threading.Thread(target=look_up, name="dns", daemon=True).start()
    except RuntimeError:
        raise OSError(errno.EAGAIN, "no thread can be started") from None
    return await found


class DnsName:
    """Looks the name up again every `interval_s`. A failed lookup keeps the nodes of the last one."""

    def __init__(self, role: NodeRole, name: HostPort, interval_s: float, resolve: Resolve = resolve) -> None:
        self.label = f"--{role.value}-dns {name}"
        self.problem: str | None = f"{self.label}: not looked up yet"
        self._role = role
        self._name = name
        self._interval_s = interval_s
        self._resolve = resolve
        self._members: frozenset[Member] = frozenset()

    async def run(self, found: Found) -> None:
        while True:
            await self.look()
            found(self._members)
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        host, port = self._name.host, self._name.port
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                addresses = await self._resolve(host)
        except OSError as error:
            self._set_problem(f"{self.label}: {error.strerror or f'no answer within {LOOKUP_TIMEOUT_S:g} s'}")
            return
        self._members = frozenset(Member(self._role, HostPort(address, port), host) for address in addresses)
        self._set_problem(None)

    def _set_problem(self, problem: str | None) -> None:
        if problem and problem != self.problem:
            log.warning("%s; its %d nodes stay", problem, len(self._members))
        self.problem = problem
