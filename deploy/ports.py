"""Ports that stay reserved while no process of ours listens on them.

A socket that is bound but does not listen keeps its port: the kernel does not hand it out as a free one. With
SO_REUSEADDR on both sockets, a child process may listen there all the same. So a port is chosen once, without a race,
and a restarted child gets it again.
"""

from __future__ import annotations

from typing import Self

from baton.address import HostPort
from baton.process.listening import bind_socket


class PortTaken(Exception):
    """Another process listens there, or the address is not this machine's. The message names the address."""


class HeldPort:
    """Holds `address`, with a free port for port 0, until `close` or the end of its context. Raises PortTaken."""

    def __init__(self, address: HostPort) -> None:
        try:
            self._socket = bind_socket(address)
        except OSError as error:
            raise PortTaken(f"{address} cannot be had: {error.strerror or error}") from None
        self.address = HostPort(address.host, self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
