"""`baton doctor --peer`: tests the way to a listener, and says what it found to both."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.address import HostPort
from deploy.doctor import clocks
from deploy.doctor.child import ChildFailed, call
from deploy.doctor.finding import Finding, failure, ok
from deploy.doctor.transfer import streams, verdicts
from deploy.doctor.transfer.control import TestFailed, dial
from deploy.doctor.transfer.links import interface_to, nic_gb_s, rdma_gb_s
from deploy.doctor.transfer.listen import Host, Listener
from deploy.doctor.transfer.verdicts import Way
from deploy.doctor.transports import on_gpu
from kv_transfer.transports.host import boot_id

if TYPE_CHECKING:
    from deploy.doctor.transfer.ends import Measured

_REPORT_S = 10.0
_HOW = "Start baton doctor --listen there first, open the port between the two, give both the same settings."


@dataclass(frozen=True, slots=True)
class Test:
    """What to do, and with what."""

    __test__ = False  # to pytest its name looks like a test's

    transport: str
    mib: int | None
    host: Host


def within_machine(test: Test) -> Iterator[Finding]:
    """The test between two processes of this machine."""
    address = HostPort("127.0.0.1", 0)
    try:
        listener = Listener(address, test.host)
    except OSError as error:
        yield failure("peer", f"{address}: {error.strerror}.", "Give the machine a loopback interface.")
        return
    thread = threading.Thread(target=_serve, args=(listener,), daemon=True)
    thread.start()
    try:
        yield from findings(listener.address, test)
    finally:
        listener.close()
        thread.join(_REPORT_S)


def _serve(listener: Listener) -> None:
    with contextlib.suppress(TestFailed, OSError):
        listener.serve()


def findings(peer: HostPort, test: Test) -> Iterator[Finding]:
    """What is found on the way to the peer, which gets the same as a report."""
    found = []
    for finding in _examine(peer, test):
        found.append(finding)
        yield finding
    if found[0].verdict == "failure":
        return  # it does not answer
    with (
        contextlib.suppress(TestFailed),
        contextlib.closing(dial(peer, "report", test.host.secret, _REPORT_S)) as control,
    ):
        control.say(findings=[dataclasses.asdict(finding) for finding in found])


def _examine(peer: HostPort, test: Test) -> Iterator[Finding]:
    secret, timeout_s = test.host.secret, test.host.timeout_s
    try:
        with contextlib.closing(dial(peer, "clock", secret, timeout_s)) as control:
            hello = control.hear()
            nic = nic_gb_s(interface_to(control.socket))
            same_host = hello.get("boot") == boot_id()
            where = "this machine" if same_host else "another machine"
            yield ok("peer", f"{peer} answers: {hello.get('host')}, {where}.")
            yield clocks.offset(*streams.clock_offset(control), str(peer))
        tcp = streams.measure(peer, secret, timeout_s)
    except TestFailed as error:
        yield failure("peer", f"{peer}: {error}.", _HOW)
        return
    way = Way(same_host, on_gpu(test.host.device), test.transport, tcp, 0.0, nic, rdma_gb_s())
    yield verdicts.sockets(way)
    try:
        measured = _transfer(peer, test)
    except (TestFailed, ChildFailed) as error:
        reason = str(error).removeprefix(f"{TestFailed.__name__}: ")
        yield failure("transfer", f"No KV can be moved to {peer}: {reason}.", "Look at the check of that transport.")
        return
    way = dataclasses.replace(way, copy_gb_s=measured.copy_gb_s)
    yield verdicts.transfer(way, measured.gb_s, measured.num_bytes)


def _transfer(peer: HostPort, test: Test) -> Measured:
    """Raises TestFailed or ChildFailed."""
    if test.host.in_process:
        return send_transfer(peer, test)
    return call(send_transfer, test.host.timeout_s, peer, test)


def send_transfer(peer: HostPort, test: Test) -> Measured:
    """In a process of its own. Raises TestFailed."""
    from deploy.doctor.transfer import ends  # imports torch

    host = test.host
    with contextlib.closing(dial(peer, "transfer", host.secret, host.timeout_s)) as control:
        device = "cuda:0" if on_gpu(host.device) else "cpu"
        mib = test.mib or (ends.GPU_MIB if device != "cpu" else ends.CPU_MIB)
        num_blocks = max(1, (mib << 20) // ends.LAYOUT.block_bytes)
        own = str(control.socket.getsockname()[0])
        options = ends.Options(test.transport, device, num_blocks, host.interface, own)
        return ends.send(control, options, host.secret)
