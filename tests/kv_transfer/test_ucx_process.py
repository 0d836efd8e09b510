"""UCX's part in a process's life: its address, its start, its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferError
from kv_transfer.transports.ucx.address import pack_address, unpack_address
from kv_transfer.transports.ucx.form import is_worker_address
from tests.fork_server import run_program
from tests.kv_transfer.rig_node import DEADLINE_S

HERE = (1, 21, 0)


@given(st.binary(min_size=1))
def test_an_address_survives_the_way(worker_address: bytes) -> None:
    for machine in ("this", "that"):
        address = pack_address((1, 21, 7), machine, worker_address)
        assert unpack_address(HERE, "this", address, "peer") == (worker_address, machine == "this")


@given(st.binary(min_size=1), st.data())
def test_a_damaged_address_is_refused(worker_address: bytes, data: st.DataObject) -> None:
    address = bytearray(pack_address(HERE, "this", worker_address))
    position = data.draw(st.integers(0, len(address) - 1))
    address[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError):
        unpack_address(HERE, "this", bytes(address), "peer")


@pytest.mark.parametrize("theirs", [(1, 20, 0), (2, 21, 0)])
def test_another_version_of_ucx_is_refused(theirs: tuple[int, int, int]) -> None:
    with pytest.raises(TransferError, match=r"UCX 1\.21\.0 != \d\.2\d\.0 of peer"):
        unpack_address(HERE, "this", pack_address(theirs, "this", b"worker"), "peer")


def test_memory_of_a_gpu_is_described_as_it_is() -> None:
    """As far as can be told without one: `Array` reads what it is told."""
    from kv_transfer.transports.ucx.buffer import Array, _DeviceBytes, buffer_of  # type: ignore[attr-defined]

    memory = torch.arange(64, dtype=torch.uint8)
    for buffer in (Array(_DeviceBytes(memory, 17)), buffer_of(memory, 17)):
        assert (buffer.ptr, buffer.nbytes, buffer.contiguous) == (memory.data_ptr(), 17, True)
    assert Array(_DeviceBytes(memory, 17)).cuda
    assert not buffer_of(memory, 17).cuda


WORKER = bytes.fromhex(  # of UCX 1.21, with TCP over two interfaces, shared memory and CMA
    "206dc7445e1fd3ab8f0000637577cc2b320040975000000000004f03008851e189dfb3c9ef5501060002c0000202cf1917b751389763344bd7"
    "e037370013230082e8db01120102ef85d1ff32228db3f9ffffef00000000cf1917b75138539e3e4bd7e037370113230082c5890208ef85d1ff"
    "32228d338d5377cc2b320000705077ccab33004f2300880a800300000000000308ef85d1ff32228d33a7d377cc2b320000705077ccab33004f"
    "230088767a0040040000c00408ef85d1ff32228d33478bbd37063600242e5077ccab330092210084767a00008580"
)


def test_an_address_of_a_worker_is_known_by_its_form() -> None:
    assert is_worker_address(WORKER)
    for end in range(len(WORKER)):
        assert not is_worker_address(WORKER[:end])
    assert not is_worker_address(WORKER + b"\0")


@given(st.binary(max_size=300))
def test_garbage_has_another_form(garbage: bytes) -> None:
    is_worker_address(WORKER[:9] + garbage)  # raises nothing
    assert not is_worker_address(b"\x2c" + garbage)


def test_a_stranger_s_address_does_not_end_the_process(tmp_path: Path) -> None:
    """Whose checksum is right, as anybody can make it: what is no worker's address is not given to UCX at all, and
    changes of one that is are survived."""
    program = f"""
import random
from baton.errors import TransferError
from kv_transfer import create
from kv_transfer.staging import Staging
from kv_transfer.transports.ucx.address import _HEAD, pack_address
first, second = (create("ucx", Staging(1, 4096, "cpu"), lambda: None) for _ in range(2))
version, machine, rng = first._version, first._machine, random.Random(5)
worker = second.info()[_HEAD.size:]
assert first._knows_form
addresses = [bytes((1, 2, 3)), bytes(200), bytes((0x2c,)) * 60, worker[:-1], worker + worker, {WORKER!r}]
addresses += [rng.randbytes(rng.randint(0, 300)) for _ in range(300)]
for _ in range(40):
    changed = bytearray(worker)
    for _ in range(rng.randint(1, 6)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    addresses.append(bytes(changed))
refused = 0
for number, address in enumerate(addresses):
    try:
        first.connect(f"peer {{number}}", pack_address(version, machine, address), 0.01)
    except TransferError as error:
        refused += "is no address of a UCX worker" in error.message
    first.disconnect(f"peer {{number}}")
assert refused > 300, refused
first.connect("second", second.info())
print("done")
"""
    run = run_program(program, tmp_path, env=os.environ | {"UCX_LOG_LEVEL": "fatal"}, timeout_s=DEADLINE_S)
    assert run.stdout.splitlines()[-1:] == ["done"], run.stderr
    assert run.returncode == 0, run.stderr


def test_a_process_may_end_without_closing_and_no_unknown_interface_is_taken(tmp_path: Path) -> None:
    program = """
from baton.errors import TransferError
from kv_transfer import create
from kv_transfer.staging import Staging
try:
    create("ucx", Staging(1, 4096, "cpu"), lambda: None, "nonesuch0")
except TransferError as error:
    print(error.message)
staging = Staging(1, 4096, "cpu")
transport = create("ucx", staging, lambda: None, "lo")
transport.connect("peer", create("ucx", Staging(1, 4096, "cpu"), lambda: None, "lo").info())
staging.lend(staging.take())
transport.expect("peer", 1, 0, 4096)
print("done")
"""
    run = run_program(program, tmp_path, env=os.environ, timeout_s=DEADLINE_S)
    assert "there is no network interface nonesuch0, or UCX cannot use it" in run.stdout
    assert run.stdout.splitlines()[-1] == "done"
    assert run.returncode == 0, run.stderr


def test_a_peer_that_hangs_holds_up_neither_who_connects_nor_the_close(tmp_path: Path) -> None:
    """Peers that stop after each step of their hello, and after one more message that is not expected."""
    program = """
import os
import time
import numpy as np
from ucxx._lib import libucxx as ucx
from ucxx._lib.arr import Array
from kv_transfer import create
from kv_transfer.staging import Staging
from kv_transfer.transports.ucx.address import _HEAD
from kv_transfer.transports.ucx.thread import _HELLO_BYTES, _HELLO_TAG

class Peer:
    def __init__(self, address):
        self.worker = ucx.UCXWorker(ucx.UCXContext({}))
        self.worker.init_blocking_progress_mode()
        target = ucx.UCXAddress.create_from_buffer(address[_HEAD.size:])
        self.endpoint = ucx.UCXEndpoint.create_from_worker_address(self.worker, target, True)
        self.memory = np.zeros(1 << 20, dtype=np.uint8)
        self.requests = []
        self.send(_HELLO_TAG, _HELLO_BYTES)

    def send(self, tag, num_bytes):
        self.requests.append(self.endpoint.tag_send(Array(self.memory[:num_bytes]), ucx.UCXXTag(tag)))

    def progress(self, num_steps):
        while num_steps and not self.requests[-1].completed:
            num_steps -= self.worker.progress_once()

target, other = (create("ucx", Staging(1, 4096, "cpu"), lambda: None) for _ in range(2))
peers = [Peer(target.info()) for _ in range(5)]
for num_steps, peer in enumerate(peers):
    peer.progress(num_steps)
other.connect("target", target.info())
peers[-1].progress(100)
peers[-1].send(7, 1 << 20)
target.connect("other", other.info())  # after which the target has this message too
began = time.monotonic()
target.close()
print("closed in time" if time.monotonic() - began < 5 else "closed late", flush=True)
os._exit(0)  # a worker that hangs cannot be freed
"""
    env = os.environ | {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal"}
    run = run_program(program, tmp_path, env=env, timeout_s=DEADLINE_S)
    assert run.stdout.splitlines()[-1:] == ["closed in time"], run.stdout + run.stderr
    assert run.returncode == 0, run.stderr


def test_ucx_knows_what_it_is_told(tmp_path: Path) -> None:
    """A variable that it does not know it would pass over in silence."""
    program = """
import os
from kv_transfer import create
from kv_transfer.staging import Staging
before = set(os.environ)
transport = create("ucx", Staging(1, 4096, "cpu"), lambda: None)
print(*sorted(name for name in set(os.environ) - before if name.startswith("UCX_MEM_")))
transport.close()
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    env |= {"UCX_WARN_UNUSED_ENV_VARS": "y", "UCX_NONESUCH": "1"}
    run = run_program(program, tmp_path, env=env, timeout_s=DEADLINE_S)
    assert run.returncode == 0, run.stderr
    warnings = [line for line in (run.stdout + run.stderr).splitlines() if "unused environment variable" in line]
    assert any("UCX_NONESUCH" in line for line in warnings)
    assert not any("BISTRO" in line for line in warnings)
    assert "UCX_MEM_BISTRO_GRACE_DURATION" in run.stdout.split()
