"""Ports that several processes listen on, held by a socket of their parent's that does not listen."""

from __future__ import annotations

import socket

from baton.address import HostPort


class SharedPort:
    """Holds `address`, with a free port for port 0. Raises OSError if it is in use, also by workers of another router:
    those would silently get half of the connections."""

    def __init__(self, address: HostPort) -> None:
        port = address.port
        with _socket(address) as alone:
            alone.bind((address.host, port))
            alone.listen()  # without this, a port that others share would do
            port = alone.getsockname()[1]
        self._socket = _socket(address)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind((address.host, port))
        except OSError:
            self._socket.close()
            raise
        self.address = HostPort(address.host, port)

    def close(self) -> None:
        self._socket.close()


def _socket(address: HostPort) -> socket.socket:
    opened = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return opened
