"""Which path UCX takes to a peer, and why it does not take a faster one.

UCX chooses silently, and a copy over NVLink is 400 times as fast as one through the host's TCP stack.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from kv_transfer.transports.host import rdma_devices

SHARED_MEMORY = frozenset({"mm", "posix", "shm", "sm", "sysv", "xpmem"})
_VERBS = frozenset({"rc_mlx5", "dc_mlx5", "rc_verbs", "ud_verbs", "ud_mlx5"})
_SHM = Path("/dev/shm")
_SHM_BYTES = 256 << 20
"""Docker's default is 64 MiB, less than the queues of a few processes need."""
_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MOST = 64


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """ucp_ep_attr_t"""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local", ctypes.c_uint64 * 16),
        ("remote", ctypes.c_uint64 * 16),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


def path_of(endpoint: int) -> tuple[str, ...]:
    """The transports and devices of a connected endpoint, which is given by its address in memory: ("cuda_ipc/cuda",
    "tcp/eth0"). Empty when UCX does not report them."""
    entries = (_Entry * _MOST)()
    attributes = _Attributes(
        field_mask=_TRANSPORTS, entries=entries, num_entries=_MOST, entry_size=ctypes.sizeof(_Entry)
    )
    query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))
    if query(endpoint, ctypes.byref(attributes)) != 0:
        return ()
    found = entries[: attributes.num_entries]
    return tuple(dict.fromkeys(f"{e.transport.decode()}/{e.device.decode()}" for e in found))


@dataclass(frozen=True, slots=True)
class Machine:
    """What the path depends on at this end. `tls`: the value of UCX_TLS. `resources`: the transports and devices that
    UCX found, as in `path_of`."""

    on_gpu: bool
    exportable: bool
    tls: str
    resources: frozenset[str]
    shm_bytes: int
    rdma: tuple[str, ...]


def look(on_gpu: bool, exportable: bool, context_info: str) -> Machine:
    """This machine. exportable: other processes can map the slots' memory. context_info: UCX's own description."""
    lines = [line.split() for line in context_info.splitlines()]
    try:
        stat = os.statvfs(_SHM)
        shm_bytes = stat.f_bavail * stat.f_frsize
    except OSError:
        shm_bytes = 0
    return Machine(
        on_gpu=on_gpu,
        exportable=exportable,
        tls=os.environ.get("UCX_TLS", ""),
        resources=frozenset(words[-1] for words in lines if "resource" in words),
        shm_bytes=shm_bytes,
        rdma=rdma_devices(),
    )


def slowness(machine: Machine, path: tuple[str, ...], same_host: bool) -> str | None:
    """Why KV takes a slow path to a peer, for people; None: the path is fast, or there is no reason to report."""
    taken, found = _names(path), _names(machine.resources)
    if not path or taken - {"tcp", "self"} - SHARED_MEMORY - {"cma", "cuda_copy"}:
        return None  # a GPU link, or RDMA
    if not same_host:
        return _no_rdma(machine, found)
    if machine.on_gpu:
        return _no_cuda_ipc(machine, found)
    return _no_shared_memory(machine, taken)


def _no_cuda_ipc(machine: Machine, found: set[str]) -> str:
    if machine.tls and "cuda_ipc" not in machine.tls and "cuda" not in machine.tls.split(","):
        reason = f"UCX_TLS={machine.tls} leaves cuda_ipc out"
    elif not machine.exportable:
        reason = "memory of expandable segments cannot be mapped by others: PYTORCH_CUDA_ALLOC_CONF asks for them"
    elif "cuda_ipc" not in found:
        reason = "UCX has no cuda_ipc here: is it built with CUDA, and is the driver's library in the container?"
    else:
        reason = "the GPUs cannot reach each other, or the nodes are in containers without --ipc=host and --pid=host"
    return f"between GPUs of one host through its memory, not over NVLink or PCIe: {reason}"


def _no_shared_memory(machine: Machine, taken: set[str]) -> str | None:
    if not SHARED_MEMORY & set(machine.tls.split(",")) or SHARED_MEMORY & taken:
        return None
    if machine.shm_bytes < _SHM_BYTES:
        reason = f"/dev/shm has {machine.shm_bytes >> 20} MiB left: start the container with --shm-size or --ipc=host"
    elif not SHARED_MEMORY & _names(machine.resources):
        reason = "UCX cannot use it here"
    else:
        reason = "the nodes do not share it: containers need --ipc=host"
    return f"within one host over TCP, though UCX_TLS={machine.tls} asks for shared memory: {reason}"


def no_rdma(machine: Machine) -> str | None:
    """Why UCX uses none of the machine's RDMA devices, for people; None: it has none, or uses them."""
    found = _names(machine.resources)
    return None if found & _VERBS else _no_rdma(machine, found)


def _no_rdma(machine: Machine, found: set[str]) -> str | None:
    if not machine.rdma:
        return None
    devices = ", ".join(machine.rdma)
    if found & _VERBS:
        reason = "the peer, UCX_TLS or --transfer-interface leaves it out"
    else:
        reason = "this UCX was built without verbs, as PyPI's is: use the system's, or --transport nixl"
    return f"to another host over TCP, though this one has {devices}: {reason}"


def _names(path: frozenset[str] | tuple[str, ...]) -> set[str]:
    return {entry.partition("/")[0] for entry in path}
