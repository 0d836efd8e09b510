"""One side of KV transfers, for tests: a transport, staging, a pool and a mover, and what there is to ask of them."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from baton.errors import BatonError
from baton.layout import KvLayout, LayerKv
from kv_transfer.async_operation import RemoteSlot
from kv_transfer.parts import slot_bytes_for
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.staging import SlotState, Staging
from kv_transfer.transport import Arrived

ROLES = ("sender", "receiver", "raw")
BLOCK_BYTES = 4096
NUM_BLOCKS = 64
DEADLINE_S = 40.0
LAYOUT = KvLayout((LayerKv(2, 8, 8, "float32"),) * 2, 16, "fingerprint")
OTHER_LAYOUT = KvLayout((LayerKv(2, 8, 8, "float32"),) * 2, 16, "another model")


def pool_of(seed: int, num_blocks: int = NUM_BLOCKS) -> np.ndarray[Any, Any]:
    """[num_blocks, BLOCK_BYTES] of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)


def digest_of(pool: np.ndarray[Any, Any]) -> bytes:
    return hashlib.blake2b(pool.data).digest()


def header_of(tag: int) -> bytes:
    """What the bare transport's messages are headed by."""
    return f"message {tag}".encode() * (1 + tag % 3)


def arrived(peer: str, tag: int, slot: int) -> Arrived:
    return Arrived(peer, tag, slot, header_of(tag))


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Stores:
    """What stores at the peer, until the test ends it."""

    error = ""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


class Node:
    """One side of transfers. `role`: "sender", "receiver", or "raw" for the bare transport."""

    def __init__(
        self,
        make: Callable[[Staging, Callable[[], None]], Any],
        role: str,
        seed: int = 0,
        num_slots: int = 4,
        part_blocks: int = 8,
        num_blocks: int = NUM_BLOCKS,
        layout: KvLayout = LAYOUT,
        device: str = "cpu",
        stage: Callable[[int, int, str], Staging] = Staging,
    ) -> None:
        self.staging = stage(num_slots, slot_bytes_for(part_blocks, BLOCK_BYTES), device)
        self._woken = threading.Event()
        self._log = Log()
        logging.getLogger("kv_transfer").addHandler(self._log)
        logging.getLogger("kv_transfer").setLevel(logging.DEBUG)
        self.transport = make(self.staging, self._woken.set)
        self.pool = torch.from_numpy(pool_of(seed, num_blocks)).to(device)
        if role == "sender":
            self.mover: Any = KvSender(self.transport, self.staging, self.pool, layout)
        elif role == "receiver":
            self.mover = KvReceiver(self.transport, self.staging, self.pool, layout)
        else:
            self.mover = self.transport
        self._role = role
        self._events: list[Any] = []
        self._placed: RemoteSlot | None = None
        self._stores = Stores()

    # ---- connections ----

    def info(self) -> bytes:
        return bytes(self.transport.info())

    def connect(self, peer: str, address: bytes, times: int = 1, timeout_s: float = DEADLINE_S) -> None:
        """`times` at once, from as many threads."""
        errors: list[BatonError] = []

        def one() -> None:
            try:
                self.transport.connect(peer, address, timeout_s)
            except BatonError as error:
                errors.append(error)

        threads = [threading.Thread(target=one) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def disconnect(self, peer: str) -> None:
        self.transport.disconnect(peer)

    def close(self) -> None:
        self.transport.close()
        logging.getLogger("kv_transfer").removeHandler(self._log)

    # ---- movers ----

    def send(self, peer: str, lease: int, parts: dict[int, list[int]]) -> list[bool]:
        return [self.mover.send(peer, lease, part, blocks) for part, blocks in parts.items()]

    def drain(self, peer: str, lease: int, part: int) -> bool:
        return bool(self.mover.drain(peer, lease, part))

    def expect(self, peer: str, lease: int, parts: dict[int, list[int]]) -> list[bool]:
        """{part: the blocks that it goes into}"""
        return [self.mover.expect(peer, lease, part, blocks) for part, blocks in parts.items()]

    def withdraw(self, lease: int) -> None:
        self.mover.withdraw(lease)

    # ---- the bare transport ----

    def fill(self, value: int) -> int:
        """Take a slot and fill it; returns the slot."""
        slot = self.staging.take()
        assert slot is not None
        self.refill(slot, value)
        return slot

    def refill(self, slot: int, value: int) -> None:
        assert self.staging.state(slot) is SlotState.HELD
        self.staging.memory(slot).fill_(value)
        self._synchronize()

    def push(self, peer: str, tag: int, slot: int, num_bytes: int | None = None, header: bytes | None = None) -> None:
        self.staging.lend(slot)
        size = num_bytes or self.staging.slot_bytes
        self.transport.push(peer, tag, slot, size, header_of(tag) if header is None else header)

    def post(self, peer: str, tag: int, slot: int, num_bytes: int | None = None) -> None:
        self.staging.lend(slot)
        self.transport.expect(peer, tag, slot, num_bytes or self.staging.slot_bytes)

    def place(self, peer: str, tag: int, value: int) -> bool:
        """Fill the peer's slot for that tag, where this process reaches it. `push` is to follow."""
        self._placed = self.transport.acquire_remote_slot(peer, tag, self.staging.slot_bytes)
        if self._placed is not None:
            self.store(value)
        return self._placed is not None

    def store(self, value: int) -> None:
        """Fill again what `place` filled."""
        assert self._placed is not None
        self._placed.memory.fill_(value)
        self._synchronize()

    def announce(self, tag: int) -> None:
        """Tell the peer that it is being stored to, before it is pushed."""
        assert self._placed is not None
        self._placed.announce(header_of(tag))

    def signal(self) -> None:
        """Tell the peer that all is there that `place` or `store` has stored, whether it is pushed or not."""
        assert self._placed is not None
        on_gpu = self.staging.device.type == "cuda"
        self._placed.signal(torch.cuda.current_stream(self.staging.device) if on_gpu else None)
        self._synchronize()

    def push_early(self, peer: str, tag: int, slot: int) -> None:
        """What `place` filled goes on being stored to, until `end_stores`."""
        self.staging.lend(slot)
        self._stores = Stores()
        self.transport.push(peer, tag, slot, self.staging.slot_bytes, header_of(tag), self._stores)

    def end_stores(self) -> None:
        self._stores.over = True

    def spun_s(self, window_s: float) -> float:
        """The processor time that the transport's thread uses within that window."""
        thread = next(t for t in threading.enumerate() if t.name == "kv-ipc" and t.ident)
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        before = time.clock_gettime(clock)
        threading.Event().wait(window_s)
        return time.clock_gettime(clock) - before

    def old_memory_is_over(self) -> list[bool]:
        """Of what slots had before they were given other memory: whether it may serve again."""
        return [is_over() for _, is_over in self.staging._retired]

    def wait_for_old_memory(self) -> None:
        """Until all of it is over."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(self.old_memory_is_over()):
            assert time.monotonic() < deadline
            os.sched_yield()

    def values(self, slot: int) -> set[int]:
        """All byte values in a slot."""
        return _values(self.staging.memory(slot))

    def poison(self, value: int) -> None:
        """Fill all free slots."""
        for slot in range(self.staging.num_slots):
            self.staging.memory(slot).fill_(value)
        self._synchronize()

    def see_first_byte(self, slot: int, before: int) -> None:
        """Return once the network has written over the slot's first byte, which was `before`."""
        memory: Any = self.staging.memory(slot)
        if not memory.is_cuda:
            memory = memory.numpy()  # a look costs less
        deadline = time.monotonic() + DEADLINE_S
        while memory[0] == before:
            assert time.monotonic() < deadline
            os.sched_yield()

    def middle(self, slot: int) -> int:
        """The address of the byte in the middle of a slot; 0 on a GPU."""
        memory = self.staging.memory(slot)
        return 0 if memory.is_cuda else memory.data_ptr() + len(memory) // 2

    def middle_byte(self, slot: int) -> int:
        memory = self.staging.memory(slot)
        return int(memory[len(memory) // 2])

    # ---- what happened ----

    def told(self, flags: str) -> list[str]:
        """What has been logged with these words."""
        return [text for text in self._log.texts if flags in text]

    def wait(self, count: int) -> list[Any]:
        """The next `count` events, in order; fails when they do not come."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self._woken.clear()
            self._take()
            if len(self._events) >= count:
                taken, self._events = self._events[:count], self._events[count:]
                return taken
            if not self._woken.wait(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"after {DEADLINE_S} s only {self._events}")

    def wait_for(self, event: Any) -> None:
        """Until exactly that has happened; other events stay for `wait`."""
        deadline = time.monotonic() + DEADLINE_S
        self._woken.clear()
        while self._take() or event not in self._events:
            assert self._woken.wait(max(0.0, deadline - time.monotonic())), f"{event} is not in {self._events}"
            self._woken.clear()
        self._events.remove(event)

    def free_slots_after_end(self) -> int:
        """Once the mover has no part under way any more."""
        deadline = time.monotonic() + DEADLINE_S
        self._woken.clear()
        while self._take() or self.staging.num_free < self.staging.num_slots:
            assert self._woken.wait(max(0.0, deadline - time.monotonic())), "a slot is not free"
            self._woken.clear()
        return self.free_slots()

    def pending_events(self) -> list[Any]:
        self._take()
        taken, self._events = self._events, []
        return taken

    def _take(self) -> None:
        for event in self.mover.poll():
            if self._role == "raw" and hasattr(event, "slot"):
                self.staging.reclaim(event.slot)
            self._events.append(event)

    def blocks(self, ids: list[int]) -> bytes:
        return self.pool[ids].cpu().numpy().tobytes()

    def pool_bytes(self) -> bytes:
        return self.pool.cpu().numpy().tobytes()

    def pool_digest(self) -> bytes:
        return digest_of(self.pool.cpu().numpy())

    def _synchronize(self) -> None:
        if self.staging.device.type == "cuda":
            torch.cuda.synchronize(self.staging.device)

    def free_slots(self) -> int:
        """After an integrity check, and the copies of what landed."""
        self._synchronize()
        if self._role == "receiver":
            assert self.mover.num_free_slots == self.staging.num_free
        (self.staging if self._role == "raw" else self.mover).check_integrity()
        return self.staging.num_free

    def give_back(self, slot: int) -> None:
        self.staging.give_back(slot)


def _values(memory: torch.Tensor) -> set[int]:
    low, high = (int(bound) for bound in memory.aminmax())
    return {low} if low == high else set(memory.unique().tolist())  # which takes seconds for 64 MiB
