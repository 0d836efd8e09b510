"""Moves KV blocks between nodes. It knows layouts, blocks and bytes, but not requests.

`KvSender` gathers blocks into staging slots, `KvReceiver` scatters slots into blocks, and a `Transport` moves slots
between processes: `ucx`, `nixl`, `nccl`, `ipc` within a host, or `memory` within a process. `parts` defines the message
format; copies run concurrently with a GPU's steps (`SlotCopies`). The network touches only slots, at both ends, so late
bytes land in memory that nothing reads. May import `baton`, `baton_kernels` and torch; never `engine` or a role.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.rpc.cluster_secret import ClusterSecret
from kv_transfer.transport import Transport
from kv_transfer.transports.host import LOOPBACK

if TYPE_CHECKING:
    import torch

    from kv_transfer.staging import Staging

log = logging.getLogger(__name__)

TRANSPORTS = ("ucx", "ipc", "nixl", "nccl", "memory")
NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
"""What NIXL's Python package is called, by the CUDA that it is built for."""


def staging_for(name: str, num_slots: int, slot_bytes: int, device: torch.device | str) -> Staging:
    """Slots in the kind of memory that the transport of that name needs."""
    import torch

    from kv_transfer.staging import Staging
    from kv_transfer.transports.host_memory import shared_empty

    shared = name == "ipc" and torch.device(device).type == "cpu"
    return Staging(num_slots, slot_bytes, device, allocate=shared_empty if shared else None)


def create(
    name: str,
    staging: Staging,
    wake: Callable[[], None],
    interface: str | None = None,
    host: str = LOOPBACK,
    secret: ClusterSecret | None = None,
) -> Transport:
    """The transport of that name, over `staging` as `staging_for` makes it; `wake` is called, on any thread, when
    `poll` has something.

    interface: the device that carries the bytes, as in UCX_NET_DEVICES; None: the network interface with the address of
    `host`, or all for a wildcard address. secret: both ends of a connection must prove that they know it, if the
    transport has connections of its own. Raises TransferError when the machine lacks what the transport needs,
    ValueError for a name not in TRANSPORTS.
    """
    if name in ("ucx", "nixl") and not staging.is_exportable:
        log.warning("no CUDA IPC transport=%s reason=slots are in expandable segments (PYTORCH_CUDA_ALLOC_CONF)", name)
    if name == "ucx":
        from kv_transfer.transports.ucx.transport import (
            UcxTransport,  # loads a native library, which must not happen before a fork
        )

        return UcxTransport(staging, wake, interface, host)
    if name == "ipc":
        from kv_transfer.transports.carriers.ipc import IpcTransport

        return IpcTransport(staging, wake, interface, host, secret)
    if name == "nixl":
        from kv_transfer.transports.carriers.nixl import NixlCarrier
        from kv_transfer.transports.pair.transport import PairTransport

        nixl_carrier = NixlCarrier(staging.device, interface, host)
        return PairTransport(staging, wake, nixl_carrier, interface, host, secret)
    if name == "nccl":
        from kv_transfer.transports.carriers.nccl import nccl_carrier
        from kv_transfer.transports.pair.transport import PairTransport

        group_carrier = nccl_carrier(staging.device, interface, host)
        return PairTransport(staging, wake, group_carrier, interface, host, secret)
    if name == "memory":
        from kv_transfer.transports.memory import MemoryTransport, process_hub

        return MemoryTransport(process_hub(), uuid.uuid4().hex, staging, wake)
    raise ValueError(f"transport {name!r} is none of {', '.join(TRANSPORTS)}")
