"""The transport over NCCL: a group for each pair of GPUs, built directly, so that nodes can come and go.

Measured on two H200s: joining takes 0.3 s, a message 18 us, aborting a group 0.5 s, with the GPU usable afterwards.
NCCL never notices that a peer has died, and its kernel spins; the control connection (`pair/transport.py`) notices, and
the group is aborted. This ends kernels first, so once a message's event has passed, nothing accesses its slot any more.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import Store

from baton.errors import TransferError
from kv_transfer.async_operation import AsyncOperation, CudaEventOperation
from kv_transfer.transports.carriers.groups import GroupCarrier
from kv_transfer.transports.host import address_of, interface_of, network_interfaces

_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast: two GPUs gain nothing from it
    # Torch's watchdog would end the process with the first group whose peer is lost or slow.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # serialization is intended
}
_NEVER = timedelta(days=1000)


def nccl_carrier(device: torch.device, interface: str | None, host: str) -> GroupCarrier:
    """interface, host: as for a `PairTransport`. Raises TransferError without a GPU, or a torch without NCCL."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        raise TransferError("NCCL moves bytes between GPUs: it needs one, and a torch that was built with it")
    os.environ |= _ENVIRONMENT
    address = address_of(host, interface)
    if interface and interface not in network_interfaces():
        os.environ["NCCL_IB_HCA"] = f"={interface}"
    if address is not None and (name := interface_of(address)) is not None:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"
    version = ".".join(str(number) for number in torch.cuda.nccl.version()[:2])  # type: ignore[no-untyped-call]
    return GroupCarrier("nccl", version, device, lambda store, rank: NcclGroup(device, store, rank), address)


class NcclGroup:
    """A communicator of two ranks. Its operations run in order on NCCL's own stream."""

    def __init__(self, device: torch.device, store: Store, rank: int) -> None:
        torch.cuda.set_device(device)
        options: Any = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        options.is_high_priority_stream = True
        self._group: Any = torch.distributed.ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(device)
        self._peer = 1 - rank
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def send(self, memory: Tensor) -> AsyncOperation:
        return self._start(self._group.send, memory)

    def receive(self, memory: Tensor) -> AsyncOperation:
        return self._start(self._group.recv, memory)

    def abort(self) -> None:
        self._group.abort()
        self._group = None

    def _start(self, verb: Any, memory: Tensor) -> AsyncOperation:
        with torch.cuda.stream(self._stream):  # so as not to wait for the engine's queued work
            work = verb([memory], self._peer, 0)
            work.wait()  # blocks the stream, not this thread
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Event(work, event)


class _Event(CudaEventOperation):
    def __init__(self, work: Any, event: Any) -> None:
        super().__init__(event)
        self._work = work  # keeps the memory alive for NCCL
