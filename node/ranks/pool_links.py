"""Makes the link of a rank's KV pool: its slots, and what carries their contents to other nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

import kv_transfer
from engine.model.memory import out_of_memory
from node.settings import NodeSettings

if TYPE_CHECKING:
    from kv_transfer.staging import Staging
    from kv_transfer.transport import Transport


def make_link(
    settings: NodeSettings,
    device: torch.device,
    host: str,
    num_slots: int,
    slot_bytes: int,
    wake: Callable[[], None],
) -> tuple[Staging, Transport]:
    """device: of the pool. host: this one's address, at which other nodes reach it. Raises TransferError, and
    ValueError if the slots do not fit."""
    with out_of_memory("--kv-slots, --kv-slot-blocks: lower them, the staging slots do not fit"):
        staging = kv_transfer.staging_for(settings.transport, num_slots, slot_bytes, device)
    interface, secret = settings.transfer_interface, settings.trust().secret
    return staging, kv_transfer.create(settings.transport, staging, wake, interface, host, secret)
