"""Processes with a mover over the memory transport, whose deliveries are up to the test."""

from __future__ import annotations

import threading

import torch

from kv_transfer.parts import slot_bytes_for
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from tests.kv_transfer.rig_node import BLOCK_BYTES, LAYOUT

NUM_BLOCKS, PART_BLOCKS, NUM_SLOTS = 6, 2, 3


class Side:
    """A process with a mover. `halves` is what both halves of each block of a receiver's pool should be full of.
    `woken`: its engine was."""

    def __init__(self, hub: MemoryHub, name: str, is_sender: bool) -> None:
        self.name = name
        self.staging = Staging(NUM_SLOTS, slot_bytes_for(PART_BLOCKS, BLOCK_BYTES), "cpu")
        self.woken = threading.Event()
        self.transport = MemoryTransport(hub, name, self.staging, self.woken.set)
        self.pool = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        kind = KvSender if is_sender else KvReceiver
        self.mover = kind(self.transport, self.staging, self.pool, LAYOUT)
        self.halves = [[0, 0] for _ in range(NUM_BLOCKS)]
        self.open: set[tuple[str, int, int]] = set()  # parts without an end
        self.outcome: dict[int, type] = {}  # lease -> the event that is due, of what has come


def linked(sender: Side, receiver: Side) -> tuple[Side, Side]:
    sender.transport.connect(receiver.name, receiver.transport.info())
    receiver.transport.connect(sender.name, sender.transport.info())
    return sender, receiver
