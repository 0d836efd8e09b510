"""Ports that several processes listen on, held by a socket of their parent's that does not listen."""

from __future__ import annotations

from baton.address import HostPort
from baton.process.listening import bind_socket, listen_socket


class SharedPort:
    """Holds `address`, with a free port for port 0. Raises OSError if it is in use, also by workers of another router:
    those would silently get half of the connections."""

    def __init__(self, address: HostPort) -> None:
        with listen_socket(address) as alone:  # one that does not listen would be given a port that others share
            self.address = HostPort(address.host, alone.getsockname()[1])
        self._socket = bind_socket(self.address, reuse_port=True)

    def close(self) -> None:
        self._socket.close()
