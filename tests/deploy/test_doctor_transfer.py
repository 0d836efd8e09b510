"""The self-test of `baton doctor`: two ends over loopback, and faults planted between them."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from baton.address import HostPort
from baton.rpc.cluster_secret import ClusterSecret
from deploy.doctor import main
from deploy.doctor.settings import DoctorSettings
from deploy.doctor.transfer import ends, links, listen, peer, verdicts
from deploy.doctor.transfer.control import Control, TestFailed, dial
from deploy.doctor.transfer.listen import Host, Listener
from deploy.doctor.transfer.peer import Test, findings
from deploy.doctor.transfer.verdicts import Way
from kv_transfer.transports.memory import MemoryHub

LOCAL = HostPort("127.0.0.1", 0)
WAIT_S = 30.0
SECRET = ClusterSecret(b"0123456789abcdef")


def host(**fields: Any) -> Host:
    stated: dict[str, Any] = {"device": "cpu", "timeout_s": WAIT_S, "in_process": True}
    return Host(**stated | fields)


@contextlib.contextmanager
def listening(**options) -> Iterator[Listener]:
    clock = options.pop("clock", time.time)
    listener = Listener(LOCAL, host(**options), clock)
    thread = threading.Thread(target=_serve, args=(listener,), daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        listener.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def _serve(listener: Listener) -> None:
    with contextlib.suppress(TestFailed):
        listener.serve()


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr("deploy.doctor.transfer.streams.STREAM_S", 0.02)
    monkeypatch.setattr(ends, "_NUM_TIMED", 2)
    monkeypatch.setattr(ends, "_NUM_WARM_UP", 1)


@pytest.fixture
def hub(monkeypatch) -> MemoryHub:
    hub = MemoryHub(auto=True)
    monkeypatch.setattr("kv_transfer.transports.memory.process_hub", lambda: hub)
    return hub


def probe(address: HostPort, transport: str = "memory", **options):
    return {finding.check: finding for finding in findings(address, Test(transport, 8, host(**options)))}


def verdict_of(found) -> dict[str, str]:
    return {check: finding.verdict for check, finding in found.items()}


def test_blocks_travel_and_are_compared_and_both_ends_hear_of_it(hub, monkeypatch):
    monkeypatch.setattr(verdicts, "FAR_BELOW", 0.0)  # of this machine's speed nothing is known
    with listening(secret=SECRET) as listener:
        found = probe(listener.address, secret=SECRET)
    assert verdict_of(found) == {"peer": "ok", "clock offset": "ok", "plain TCP": "ok", "transfer": "ok"}
    assert "8 MiB each time, every block compared" in found["transfer"].found
    assert listener.reported == [*found.values()]


def test_bytes_that_change_on_their_way_are_found(hub, monkeypatch):
    deliver = hub._deliver

    def corrupting(transfer):
        deliver(transfer)  # it lands when the event is delivered, after this returns
        transfer.receive.owner.staging.memory(transfer.receive.slot)[5] ^= 1

    monkeypatch.setattr(hub, "_deliver", corrupting)
    with listening() as listener:
        found = probe(listener.address)
    assert found["transfer"].verdict == "failure"
    assert "of 4 KV blocks did not arrive as they were sent" in found["transfer"].found


def test_a_transport_that_crawls_is_warned_of(hub, monkeypatch):
    deliver = hub._deliver

    def throttled(transfer):
        time.sleep(0.01)  # 2 MiB each: 0.2 GB/s at most
        deliver(transfer)

    monkeypatch.setattr(hub, "_deliver", throttled)
    monkeypatch.setattr(ends, "_copy_s", lambda *_: 1e-3)  # 8 GB/s, whatever else this machine does
    with listening() as listener:
        found = probe(listener.address)
    assert found["transfer"].verdict == "warning"


def test_a_peer_whose_clock_is_off_is_warned_of(hub):
    with listening(clock=lambda: time.time() + 7) as listener:
        found = probe(listener.address)
    assert found["clock offset"].verdict == "warning"
    assert "+7000" in found["clock offset"].found


@contextlib.contextmanager
def relay(target: HostPort, bytes_per_s: float) -> Iterator[HostPort]:
    """Passes connections on, at that speed towards the target."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets = [listener]

    def pump(source: socket.socket, sink: socket.socket, pause_per_byte: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                sink.sendall(data)
                time.sleep(len(data) * pause_per_byte)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = listener.accept()
                other = socket.create_connection((target.host, target.port))
                sockets.extend((one, other))
                for pair in ((one, other, 1 / bytes_per_s), (other, one, 0.0)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield HostPort("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for each in sockets:
            each.close()
        thread.join(WAIT_S)


def test_a_slow_link_is_warned_of(hub, monkeypatch):
    monkeypatch.setattr(peer, "nic_gb_s", lambda _: 12.5)
    with listening() as listener, relay(listener.address, 4e6) as way:
        found = probe(way)
    assert found["plain TCP"].verdict == "warning"
    assert "over an interface of 12.50" in found["plain TCP"].found


def test_a_peer_that_is_not_there_or_is_something_else():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = HostPort("127.0.0.1", closed.getsockname()[1])
    assert verdict_of(probe(address)) == {"peer": "failure"}
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            with web.accept()[0] as client:
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        found = probe(HostPort("127.0.0.1", web.getsockname()[1]))
        thread.join(WAIT_S)
    assert "no baton doctor" in found["peer"].found


@pytest.mark.parametrize("theirs", [None, ClusterSecret(b"another secret of enough bytes")])
def test_the_cluster_secret_must_be_the_same(theirs):
    with listening(secret=SECRET) as listener:
        found = probe(listener.address, secret=theirs)
    assert verdict_of(found) == {"peer": "failure"}
    assert "secret" in found["peer"].found


def test_a_listener_without_a_secret_is_not_believed():
    with listening() as listener:
        found = probe(listener.address, secret=SECRET)
    assert verdict_of(found) == {"peer": "failure"}


def test_a_transport_that_one_end_lacks_is_named():
    with listening() as listener:
        found = probe(listener.address, "nccl")
    assert found["transfer"].verdict == "failure"
    assert "--transport nccl cannot be used here" in found["transfer"].found


@pytest.mark.parametrize(("transport", "num_blocks"), [("pigeon", 1), ("memory", 10**6), ("memory", "all")])
def test_what_a_stranger_asks_for_is_checked(transport, num_blocks):
    with listening() as listener:
        control = dial(listener.address, "transfer", None, WAIT_S)
        control.say(transport=transport, num_blocks=num_blocks)
        with pytest.raises(TestFailed, match="the other end says: "):
            control.hear()
        control.close()


@pytest.mark.parametrize(
    "findings", [None, [], [{"check": "x"}], [dict.fromkeys(("check", "verdict", "found", "do"), "x")]]
)
def test_a_report_of_something_else_is_not_taken(findings):
    with listening() as listener:
        control = dial(listener.address, "report", None, WAIT_S)
        control.say(findings=findings)
        with pytest.raises(TestFailed, match="hung up"):
            control.hear()
        control.close()
        assert not listener.reported


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00[]", b"\x01\x00\x00\x00{", b"\x08"])
def test_garbage_is_refused(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(TestFailed):
            Control(ours, time.monotonic() + WAIT_S).hear()


def test_no_answer_ends_in_time():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TestFailed, match="in time"):
        Control(ours, time.monotonic() + 0.05).hear()


def test_a_listener_does_not_wait_for_ever():
    [finding] = main.wait_for_peer(LOCAL, host(timeout_s=0.01))
    assert (finding.check, finding.verdict) == ("peer", "failure")


def test_what_the_system_states_of_links(tmp_path, monkeypatch):
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "speed").write_text("100000\n")
    (tmp_path / "veth1").mkdir()
    (tmp_path / "veth1" / "speed").write_text("-1\n")
    monkeypatch.setattr(links, "NET", tmp_path)
    assert [links.nic_gb_s(name) for name in ("eth0", "veth1", "none", "lo", None)] == [12.5, None, None, None, None]
    for number, (state, rate) in enumerate((("4: ACTIVE", "400 Gb/sec (4X NDR)"), ("1: DOWN", "800 Gb/sec (4X XDR)"))):
        port = tmp_path / "ib" / "mlx5_0" / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text(rate)
    monkeypatch.setattr(links, "INFINIBAND", tmp_path / "ib")
    assert links.rdma_gb_s() == 50.0
    monkeypatch.setattr(links, "INFINIBAND", tmp_path / "none")
    assert links.rdma_gb_s() is None


@pytest.mark.parametrize(
    ("way", "gb_s", "verdict"),
    [
        (Way(True, True, "ipc", 2.0, 380.0), 340.0, "ok"),
        (Way(True, True, "ucx", 2.0, 380.0), 1.5, "warning"),  # through the host's TCP stack
        (Way(True, False, "ipc", 2.0, 9.0), 1.5, "ok"),
        (Way(True, False, "ucx", 2.0, 9.0), 0.9, "ok"),
        (Way(False, True, "nixl", 3.0, 900.0, 12.5, 50.0), 45.0, "ok"),
        (Way(False, True, "ucx", 3.0, 900.0, 12.5, 50.0), 3.0, "warning"),  # TCP beside an idle RDMA port
        (Way(False, True, "ucx", 1.1, 900.0, 1.25), 1.0, "ok"),
    ],
)
def test_what_is_measured_is_compared_with_the_link(way, gb_s, verdict):
    assert verdicts.transfer(way, gb_s, 1 << 26).verdict == verdict


@pytest.mark.parametrize(
    ("way", "do"),
    [
        (Way(True, True, "ucx", 2.0, 380.0), "--transport ipc"),
        (Way(True, False, "ucx", 2.0, 9.0), "--transport ipc"),
        (Way(True, False, "ipc", 2.0, 9.0), "on this machine"),
        (Way(False, True, "ucx", 3.0, 900.0, 12.5, 50.0), "does not use RDMA"),
        (Way(False, True, "ucx", 3.0, 900.0, 12.5), "--transfer-interface"),
    ],
)
def test_a_slow_transfer_comes_with_advice_that_fits_the_way(way, do):
    finding = verdicts.transfer(way, 0.1, 1 << 26)
    assert finding.verdict == "warning"
    assert do in finding.do
    assert ("--transfer-interface" in finding.do) == (not way.same_host)


def test_a_real_transport_between_two_processes(monkeypatch):
    monkeypatch.setattr(verdicts, "FAR_BELOW", 0.0)
    with listening(in_process=False) as listener:
        found = probe(listener.address, "ipc")
    assert found["transfer"].verdict == "ok", found


def test_a_secret_that_cannot_be_read_skips_the_test(tmp_path):
    [finding] = main.self_test(DoctorSettings(cluster_secret_file=tmp_path / "none"))
    assert finding.verdict == "skipped"


def test_a_machine_without_a_loopback_address(monkeypatch):
    def refuse(address: HostPort) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(listen, "listen_socket", refuse)
    [finding] = main.self_test(DoctorSettings())
    assert (finding.verdict, finding.found) == ("failure", "127.0.0.1:0: Cannot assign requested address.")
