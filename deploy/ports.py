"""Ports that stay reserved while no process of ours listens on them.

A socket that is bound but does not listen keeps its port: the kernel does not hand it out as a free one. With
SO_REUSEADDR on both sockets, a child process may listen there all the same. So a port is chosen once, without a race,
and a restarted child gets it again.
"""

from __future__ import annotations

import socket
from typing import Self

from baton.address import HostPort


class PortTaken(Exception):
    """Another process listens there, or the address is not this machine's. The message names the address."""


class HeldPort:
    """Holds `address`, with a free port for port 0, until `close` or the end of its context. Raises PortTaken."""

    def __init__(self, address: HostPort) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address.host, address.port))
        except OSError as error:
            self._socket.close()
            raise PortTaken(f"{address} cannot be had: {error.strerror or error}") from None
        self.address = HostPort(address.host, self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
