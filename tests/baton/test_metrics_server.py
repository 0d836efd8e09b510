"""A node's pages: who gets them, how often, and what garbage does not do to them."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from http import HTTPStatus

import pytest

from baton.address import HostPort
from baton.errors import DeadlineExceeded
from baton.telemetry import AdminGate, MetricsServer, new_registry
from baton.telemetry import http as pages
from baton.telemetry.admin import is_loopback
from baton.telemetry.pace import MAX_HOSTS, Pace
from tests.descriptors import NUM_CALLERS

LOCAL = HostPort("127.0.0.1", 0)
WAIT_S = 20.0


async def books() -> tuple[HTTPStatus, str]:
    return HTTPStatus.OK, '{"blocks": []}'


@contextlib.contextmanager
def serving(checks=None, served=None, gate=None):
    server = MetricsServer(
        LOCAL, new_registry("decode"), checks or {}, served or {"/debug/kv": books}, gate or AdminGate()
    )
    try:
        yield server.address
    finally:
        server.close()


def get(address: HostPort, path: str, key: str = "") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"http://{address}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def connect(address: HostPort) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=WAIT_S)


def say(address: HostPort, text: bytes) -> bytes:
    """All that the server answers to these bytes, until it closes the connection."""
    with connect(address) as client:
        client.sendall(text)
        said = b""
        while piece := client.recv(65536):
            said += piece
        return said


def test_pages_for_an_operator():
    async def hangs() -> tuple[HTTPStatus, str]:
        raise DeadlineExceeded("no turn ended")

    async def broken() -> tuple[HTTPStatus, str]:
        return HTTPStatus.SERVICE_UNAVAILABLE, "block 3 is lost"

    reasons = [None, "draining"]
    served = {"/debug/kv": books, "/hangs": hangs, "/integrity": broken}
    with serving({"/health": lambda: reasons.pop(0)}, served) as address:
        assert "baton:build_info{" in get(address, "/metrics")[1]
        assert get(address, "/health") == (200, "ok\n")
        assert get(address, "/health?verbose") == (503, "draining\n")
        assert get(address, "/debug/kv") == (200, '{"blocks": []}\n')
        assert get(address, "/hangs") == (504, "no turn ended\n")
        assert get(address, "/integrity") == (503, "block 3 is lost\n")
        assert get(address, "/else") == (404, "try /metrics /health /debug/kv /hangs /integrity\n")
        with pytest.raises(OSError, match="in use"):
            MetricsServer(address, new_registry("decode"), {}, {}, AdminGate())


def test_a_page_that_fails_costs_the_others_nothing(caplog):
    async def odd() -> tuple[HTTPStatus, str]:
        raise ZeroDivisionError

    with serving(served={"/odd": odd, "/debug/kv": books}) as address:
        assert say(address, b"GET /odd HTTP/1.1\r\n\r\n") == b""
        assert get(address, "/debug/kv")[0] == 200
    assert "ZeroDivisionError" in caplog.text


def test_the_admin_key_is_asked_of_everybody_and_may_change(tmp_path):
    key = tmp_path / "key"
    key.write_text("one\n")
    with serving({"/health": lambda: None}, gate=AdminGate(key)) as address:
        assert get(address, "/debug/kv")[0] == get(address, "/debug/kv", "two")[0] == 401
        assert get(address, "/debug/kv", "one")[0] == 200
        key.write_text("two")
        assert get(address, "/debug/kv", "two")[0] == 200
        assert get(address, "/debug/kv", "one")[0] == 401
        key.write_text("")
        assert get(address, "/debug/kv", "")[0] == 403
        assert get(address, "/health")[0] == get(address, "/metrics")[0] == 200


def test_without_a_key_only_this_machine_is_let_in():
    gate = AdminGate()
    assert gate.denies("127.0.0.1", None) is gate.denies("::ffff:127.0.0.1", None) is gate.denies("::1", None) is None
    for host in ("10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "", "localhost"):
        assert not is_loopback(host)
        denied = gate.denies(host, "Bearer key")
        assert (denied.http_status, denied.grpc_status) == (403, "PERMISSION_DENIED")
        assert "--admin-key-file" in denied.reason


def test_a_stranger_behind_a_wildcard_is_told_how(monkeypatch):
    monkeypatch.setattr("baton.telemetry.admin.is_loopback", lambda host: False)
    with serving({"/health": lambda: None}) as address:
        status, text = get(address, "/debug/kv")
        assert status == 403
        assert "--admin-key-file" in text
        assert get(address, "/health") == (200, "ok\n")


def test_each_host_has_a_pace_of_its_own():
    now = [100.0]
    pace = Pace(per_s=10, burst=2, clock=lambda: now[0])
    assert [pace.take("a", 0.25) for _ in range(6)] == pytest.approx([0, 0, 0.1, 0.2, None, None])
    assert pace.take("b", 0.25) == 0
    now[0] += 0.1
    assert pace.take("a", 0.25) == pytest.approx(0.2)
    now[0] += 60
    assert [pace.take("a", 0.25) for _ in range(3)] == pytest.approx([0, 0, 0.1])


def test_hosts_without_number_are_forgotten():
    pace = Pace(per_s=10, burst=2)
    for i in range(3 * MAX_HOSTS):
        pace.take(str(i), 1.0)
    assert len(pace._next) == MAX_HOSTS


def test_a_client_in_a_loop_waits_and_is_then_sent_away(monkeypatch):
    monkeypatch.setattr(pages, "RATE", 5.0)
    monkeypatch.setattr(pages, "BURST", 1)
    monkeypatch.setattr(pages, "PATIENCE_S", 0.3)
    with serving({"/health": lambda: None}) as address:
        clients = [connect(address) for _ in range(5)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        codes = sorted(client.recv(64).split()[1] for client in clients)
        for client in clients:
            client.close()
    assert codes == [b"200", b"200", b"429", b"429", b"429"]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400"),
        (b"GET /health\r\n\r\n", b"400"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n", b"400"),
        (b"POST /debug/kv HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"405"),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"x" * 20_000, b"431"),
    ],
)
def test_what_is_not_a_request_is_refused(said, status):
    with serving({"/health": lambda: None}) as address:
        assert say(address, said).split()[1] == status
        assert get(address, "/health") == (200, "ok\n")


def test_head_has_no_body():
    with serving({"/health": lambda: None}) as address:
        head, _, body = say(address, b"HEAD /health HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
        assert b"Content-Length: 3" in head
        assert body == b""


def test_who_says_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(pages, "HEAD_S", 0.1)
    with serving() as address:
        assert say(address, b"GET /debug") == b""


def test_the_oldest_connection_makes_room_for_the_newest(monkeypatch):
    monkeypatch.setattr(pages, "MAX_CONNECTIONS", 3)
    with serving({"/health": lambda: None}) as address, contextlib.ExitStack() as clients:
        silent = [clients.enter_context(connect(address)) for _ in range(3)]
        assert get(address, "/health") == (200, "ok\n")
        assert silent[0].recv(1) == b""


def test_without_a_descriptor_left_it_hangs_up_and_is_quiet():
    program = """
import socket
from baton.address import HostPort
from baton.telemetry import AdminGate, MetricsServer, new_registry
from tests.descriptors import heard_without_descriptors

server = MetricsServer(HostPort("127.0.0.1", 0), new_registry("decode"), {"/health": lambda: None}, {}, AdminGate())
address = (server.address.host, server.address.port)
def ask():
    with socket.create_connection(address) as client:
        client.sendall(b"GET /health HTTP/1.1\\r\\n\\r\\n")
        status = client.recv(15)
        while client.recv(1024):
            pass  # to the end: the server has that descriptor no more
        return status
print(ask())  # from then on it accepts
print(heard_without_descriptors(address))
while True:
    try:
        print(ask())
        break
    except ConnectionResetError:
        pass  # it was still hanging up on who comes
server.close()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=3 * WAIT_S
    )
    ok = "b'HTTP/1.1 200 OK'"
    assert run.stdout.splitlines() == [ok, str([b""] * NUM_CALLERS), ok], run.stdout + run.stderr
    assert run.stderr == ""


def test_closing_cuts_off_whoever_waits(caplog):
    asked = asyncio.Event()

    async def for_ever() -> tuple[HTTPStatus, str]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    with (
        caplog.at_level(logging.DEBUG),
        serving({"/asked": lambda: None if asked.is_set() else "no"}, {"/": for_ever}) as address,
    ):
        client = connect(address)
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while get(address, "/asked")[0] != 200:
            pass
    with client:
        assert client.recv(1) == b""
    assert "Task was destroyed" not in caplog.text
