"""Transports listen on the address of --listen, and on no other."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.errors import TransferError
from kv_transfer import create, staging_for
from kv_transfer.transports.carriers.groups import _serve_store
from kv_transfer.transports.host import address_of, hosts_of, interface_of, net_devices
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.listener import Listener
from tests.descriptors import NUM_CALLERS
from tests.fork_server import run_program
from tests.kv_transfer.rig_node import DEADLINE_S

LISTENING = "0A"


def listening() -> set[tuple[str, int]]:
    """(address, port) of all that this process listens on."""
    links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mine = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in mine:
                digits, _, port = local.partition(":")
                words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                raw = struct.pack(f"={len(words)}I", *words)
                family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def elsewhere() -> str:
    """An address of this machine beside its loopback's."""
    found = [host for host in hosts_of(None) if "." in host and not host.startswith("127.")]
    if not found:
        pytest.skip("this machine has no network but its loopback")
    return found[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "elsewhere", "0.0.0.0"])
def test_words_are_taken_at_the_host_alone_and_others_are_told_where(host: str) -> None:
    host = elsewhere() if host == "elsewhere" else host
    before = listening()
    transport = create("ipc", staging_for("ipc", 1, 64, "cpu"), lambda: None, host=host)
    new = {address for address, _ in listening() - before}
    hosts = PairAddress.unpack(transport.info(), "it").hosts
    address = address_of(host)
    assert (new, hosts) == (({"::"}, hosts_of(None)) if address is None else ({address}, (address,)))
    create("ipc", staging_for("ipc", 1, 64, "cpu"), lambda: None, host=host).connect("peer", transport.info())
    transport.close()


def test_who_listens_at_one_host_calls_from_there() -> None:
    """Where the peer may look for what its carrier offers besides."""
    staging = staging_for("ipc", 1, 64, "cpu")
    transport = create("ipc", staging, lambda: None, host="127.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(DEADLINE_S)
        address, port = PairAddress.unpack(transport.info(), "it"), listener.getsockname()[1]
        peer = dataclasses.replace(address, id="b" * 32, hosts=("127.0.0.1",), port=port)
        done = pool.submit(transport.connect, "peer", peer.pack())
        caller, (host, _) = listener.accept()
        assert host == "127.0.0.2"
        caller.close()
        with pytest.raises(TransferError, match="peer cannot be reached"):
            done.result(DEADLINE_S)
    transport.close()


def test_an_interface_goes_before_the_host() -> None:
    before = listening()
    transport = create("ipc", staging_for("ipc", 1, 64, "cpu"), lambda: None, "lo", elsewhere())
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    transport.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", None])
def test_groups_meet_at_the_host_alone(host: str | None) -> None:
    before = listening()
    store = _serve_store(host)
    assert {(address, store.port) for address in [host or "::"]} == listening() - before
    store.set("key", "value")


@pytest.mark.parametrize("kind", ["ucx", pytest.param("nixl", marks=pytest.mark.full)])
def test_ucx_listens_on_the_interface_that_has_the_host(kind: str, tmp_path: Path) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl_cu13", reason="the extra [nixl] is not installed")
    program = f"""
from kv_transfer import create
from kv_transfer.staging import Staging
from tests.kv_transfer.test_listening import listening
transport = create("{kind}", Staging(1, 4096, "cpu"), lambda: None)
print(*{{address for address, _ in listening()}})
transport.close()
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    run = run_program(program, tmp_path, env=env, timeout_s=DEADLINE_S)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "127.0.0.1"


def test_a_process_without_descriptors_hangs_up_on_who_dials(tmp_path: Path) -> None:
    program = """
from kv_transfer import create, staging_for
from kv_transfer.transports.pair.address import PairAddress
from kv_transfer.transports.pair.listener import Listener
from tests.descriptors import heard_without_descriptors

one, other = (create("ipc", staging_for("ipc", 1, 4096, "cpu"), lambda: None) for _ in range(2))
print(heard_without_descriptors(("127.0.0.1", PairAddress.unpack(one.info(), "one").port)))
other.connect("one", one.info())
one.close()
other.close()
print("done")
"""
    run = run_program(program, tmp_path, env=os.environ, timeout_s=DEADLINE_S)
    assert run.stdout.splitlines() == [str([b""] * NUM_CALLERS), "done"], run.stdout + run.stderr
    assert "Too many open files" in run.stderr


def test_a_listener_that_is_closed_keeps_no_descriptor() -> None:
    listener = Listener(socket.create_server(("127.0.0.1", 0)))
    spare = listener._spare
    assert spare is not None
    os.fstat(spare)
    listener.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(spare)


def test_which_interface_that_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr("kv_transfer.transports.host.rdma_devices", lambda: ())
    host = elsewhere()
    name = interface_of(host)
    assert net_devices(host) == name
    assert [net_devices("127.0.0.1"), net_devices("::1"), net_devices("::")] == ["lo", "lo", None]
    assert net_devices(host, "mlx5_0:1") == "mlx5_0:1"
    assert net_devices("203.0.113.9") is None
    assert "203.0.113.9" in caplog.text
    monkeypatch.setattr("kv_transfer.transports.host.rdma_devices", lambda: ("mlx5_0",))
    devices = net_devices(host)
    assert devices is not None
    assert devices.startswith("^")
    assert "lo" in devices[1:].split(",")
    assert name not in devices[1:].split(",")
    assert net_devices("127.0.0.1") == "lo"
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert net_devices(host) is None
