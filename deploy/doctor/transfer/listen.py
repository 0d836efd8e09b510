"""`baton doctor --listen`: answers the connections of one `baton doctor --peer`."""

from __future__ import annotations

import dataclasses
import logging
import platform
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from baton.address import HostPort
from baton.process.listening import listen_socket
from baton.rpc.cluster_secret import ClusterSecret
from deploy.doctor.child import Child, ChildFailed
from deploy.doctor.finding import Finding, Verdict
from deploy.doctor.transfer.control import Control, TestFailed, admit
from deploy.doctor.transfer.streams import answer_clock, answer_stream
from kv_transfer.transports.host import boot_id

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
_POLL_S = 0.2
"""How soon `close` ends `serve`."""


@dataclass(frozen=True, slots=True)
class Host:
    """How this end takes part. device: as for a node. in_process: without processes for transfers, for tests."""

    device: str = "auto"
    interface: str | None = None
    secret: ClusterSecret | None = None
    timeout_s: float = 300.0
    in_process: bool = False


class Listener:
    """Listens from construction to `close`. Raises OSError if the address is not available."""

    def __init__(self, address: HostPort, host: Host, clock: Callable[[], float] = time.time) -> None:
        self._listener = listen_socket(address)
        self._listener.settimeout(_POLL_S)
        self.address = HostPort(address.host, self._listener.getsockname()[1])
        self._host = host
        self._clock = clock
        self._seats = threading.Semaphore(MAX_CONNECTIONS)
        self._ended = threading.Event()
        self.reported: list[Finding] | None = None

    def serve(self) -> list[Finding]:
        """Answer until a peer reports what it found, which is returned. Raises TestFailed if none does in time, or
        `close` comes first."""
        deadline = time.monotonic() + self._host.timeout_s
        while not self._ended.is_set():
            if time.monotonic() > deadline:
                raise TestFailed(f"no baton doctor --peer has come and ended within {self._host.timeout_s:g} s")
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # it was closed
                break
            self._seats.acquire()
            threading.Thread(target=self._answer, args=(connection, deadline), daemon=True).start()
        if self.reported is None:
            raise TestFailed("closed")
        return self.reported

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def _answer(self, connection: socket.socket, deadline: float) -> None:
        connection.settimeout(None)
        control = Control(connection, deadline)
        try:
            self._serve(control, admit(control, self._host.secret))
        except (TestFailed, ChildFailed) as error:
            log.info("self-test: %s", error)
        finally:
            control.close()
            self._seats.release()

    def _serve(self, control: Control, kind: str) -> None:
        if kind == "clock":
            control.say(boot=boot_id(), host=platform.node())
            answer_clock(control, self._clock)
        elif kind == "stream":
            answer_stream(control)
        elif kind == "transfer" and self._host.in_process:
            serve_transfer(control.socket, control.deadline - time.monotonic(), self._host)
        elif kind == "transfer":
            left_s = control.deadline - time.monotonic()
            Child(serve_transfer, control.socket, left_s, self._host).result(left_s)
        elif kind == "report":
            self.reported = _findings(control.hear())
            self._ended.set()
        else:
            control.say(error=f"there is no test {kind!r}")


def serve_transfer(connection: socket.socket, timeout_s: float, host: Host) -> None:
    """In a process of its own."""
    from deploy.doctor.transfer.ends import receive  # imports torch

    control = Control(connection, time.monotonic() + timeout_s)
    receive(control, host.device, host.interface, str(connection.getsockname()[0]), host.secret)


def _findings(message: dict[str, Any]) -> list[Finding]:
    names = [field.name for field in dataclasses.fields(Finding)]
    try:
        found = [Finding(*(str(stated[name]) for name in names)) for stated in message["findings"]]  # type: ignore[arg-type]
    except (LookupError, TypeError):
        raise TestFailed("the peer reports no findings") from None
    if any(finding.verdict not in get_args(Verdict) for finding in found):
        raise TestFailed("the peer reports a verdict that is not known here")
    return found
