"""The two processes of `transports`: a sender and a receiver, each with a pool of KV blocks, staging slots and a node's
mover. They wait and wake like a node's engine thread; credits are sent over a pipe instead of gRPC."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import kv_transfer
from baton.layout import KvLayout
from baton_kernels.block_copy import gather_blocks, scatter_blocks
from benchmarks.harness.ceilings import best_s
from kv_transfer.parts import PartPlanner, PlannedPart, slot_bytes_for
from kv_transfer.receiver import KvReceiver, PartFailed, PartLanded, PartRefused
from kv_transfer.receiver import PeerDisconnected as SenderLost
from kv_transfer.sender import KvSender
from kv_transfer.sender import PartFailed as SendFailed
from kv_transfer.sender import PeerDisconnected as ReceiverLost
from node.wakeup import Wakeup

WAIT_S = 60.0
MIN_OPEN_PARTS = 2
GRANTED_S = 1e-3
"""How long the first credits are available before a transfer begins: on a node, while the prompt is computed."""
SENDER, RECEIVER = "sender", "receiver"


@dataclass(frozen=True, slots=True)
class EndOptions:
    """The options of an end. num_blocks: size of its pool. gpus: as in CUDA_VISIBLE_DEVICES, its own first; empty: runs
    on a CPU."""

    role: str
    transport: str
    layout: KvLayout
    num_blocks: int
    num_slots: int
    part_blocks: int
    layer_groups: int
    verify: bool
    gpus: str


class TransferFailed(Exception):
    """The text gives the reason."""


class End:
    """One end. `call` runs a method of `Server` in its process; if that raises, it raises TransferFailed."""

    def __init__(self, options: EndOptions, link: Connection) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, link, options), daemon=True)
        with _environment({"CUDA_VISIBLE_DEVICES": options.gpus}):
            self._process.start()
        theirs.close()

    def start(self, method: str, *args: object) -> Callable[[], Any]:
        self._pipe.send((method, args))
        return self._result

    def call(self, method: str, *args: object) -> Any:
        return self.start(method, *args)()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(WAIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._pipe.close()

    def _result(self) -> Any:
        if not self._pipe.poll(2 * WAIT_S):
            raise TransferFailed(f"no answer within {2 * WAIT_S:g} s")
        try:
            result = self._pipe.recv()
        except EOFError:
            raise TransferFailed("a process died") from None
        if isinstance(result, Exception):
            raise TransferFailed(str(result)) from result
        return result


@contextlib.contextmanager
def two_ends(sender: EndOptions, receiver: EndOptions) -> Iterator[tuple[End, End]]:
    """Both processes, connected by transport and pipe."""
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    with contextlib.ExitStack() as stack:
        ends = []
        for options, link in ((sender, mine), (receiver, theirs)):
            end = End(options, link)
            stack.callback(end.stop)
            ends.append(end)
        mine.close()
        theirs.close()
        one, other = ends
        addresses = one.call("info"), other.call("info")
        waiting = one.start("connect", RECEIVER, addresses[1]), other.start("connect", SENDER, addresses[0])
        for connected in waiting:
            connected()
        yield one, other


class Server:
    """The implementation of an end, in its process."""

    def __init__(self, options: EndOptions, link: Connection) -> None:
        self.options = options
        self.device = torch.device("cuda", 0) if options.gpus else torch.device("cpu")
        self.layout = options.layout
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (options.num_blocks, self.layout.block_bytes)
        self.source = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8, device=self.device)
        self.pool = self.source if options.role == SENDER else torch.zeros_like(self.source)
        slot_bytes = slot_bytes_for(options.part_blocks, self.layout.block_bytes)
        staging = kv_transfer.staging_for(options.transport, options.num_slots, slot_bytes, self.device)
        self._awake = Wakeup()
        self.transport = kv_transfer.create(options.transport, staging, self._awake.set)
        kind = KvSender if options.role == SENDER else KvReceiver
        self.mover: Any = kind(self.transport, staging, self.pool, self.layout, verify=options.verify)
        self.mover.warm_up()
        self._planner = PartPlanner(self.layout, self.layout, (options.part_blocks, options.part_blocks))
        self._link = link
        self._credits = 0
        self._leases = 0
        if options.role == SENDER:
            threading.Thread(target=self._hear, daemon=True).start()

    def info(self) -> bytes:
        return bytes(self.transport.info())

    def connect(self, peer: str, address: bytes) -> None:
        self.transport.connect(peer, address, WAIT_S)

    def close(self) -> None:
        self.transport.close()

    # ---- one transfer ----

    def send(self, num_blocks: int) -> float:
        """Send scattered blocks. Returns the time of its beginning, by `time.monotonic`, with the first credits
        available."""
        lease, parts, blocks = self._next(num_blocks)
        self._until(lambda: self._credits > 0)
        time.sleep(GRANTED_S)
        began = time.monotonic()
        sent = gone = 0

        def go_on() -> bool:
            nonlocal sent, gone
            for event in self.mover.poll():
                if isinstance(event, SendFailed | ReceiverLost):
                    raise TransferFailed(event.reason)
                gone += 1
            with self.mover.batched():
                while sent < min(self._credits, len(parts)) and self._send_part(lease, sent, parts[sent], blocks):
                    sent += 1
            return gone == len(parts)

        self._until(go_on)
        self._credits = 0
        return began

    def receive(self, num_blocks: int) -> float:
        """Receive them into other scattered blocks. Returns the time when all had landed and all slots were free."""
        lease, parts, blocks = self._next(num_blocks)
        granted, deadline = self.mover.mark(), time.monotonic() + WAIT_S
        credits_, landed = 0, 0

        def go_on() -> bool:
            nonlocal credits_, landed
            for event in self.mover.poll():
                if isinstance(event, PartFailed | SenderLost):
                    raise TransferFailed(event.reason)
                if isinstance(event, PartRefused):
                    raise TransferFailed(event.error.message)
                assert isinstance(event, PartLanded)
                landed += 1
            before = credits_
            while credits_ < len(parts) and credits_ - landed < max(MIN_OPEN_PARTS, self.mover.num_free_slots):
                part = parts[credits_]
                where = _named(blocks, part), part.kv_slice, granted
                if not self.mover.expect(SENDER, lease, credits_, *where, credits_ + 1 == len(parts)):
                    break
                credits_ += 1
            if credits_ > before:
                self._link.send(credits_)
            return landed == len(parts)

        self._until(go_on)
        while self.mover.num_free_slots < self.options.num_slots:  # a slot is free once its copy is done
            if time.monotonic() > deadline:
                raise TransferFailed(f"slots are not free within {WAIT_S:g} s")
        return time.monotonic()

    def clear(self) -> None:
        self.pool.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def check(self, num_blocks: int) -> str | None:
        """Verify one transfer into a zeroed pool. Returns the error, or None if every byte is correct."""
        permutation = self._permutation(num_blocks, SENDER)
        blocks = self._permutation(num_blocks, RECEIVER)
        for sent, landed in zip(permutation, blocks, strict=True):
            if not torch.equal(self.pool[landed], self.source[sent]):
                return f"block {sent} did not come whole"
        untouched = torch.ones(len(self.pool), dtype=torch.bool, device=self.device)
        untouched[torch.tensor(blocks, device=self.device)] = False
        if bool(self.pool[untouched].any()):
            return "a block was written that was not sent"
        self.mover.check_integrity()
        return None

    def count_parts(self, num_blocks: int) -> int:
        return len(self._planner.plan(0, num_blocks, 0, self.options.layer_groups))

    def count_placed(self) -> int:
        """How many parts so far were gathered directly into the receiver's slots."""
        return int(self.mover.num_placed_parts)

    # ---- ceilings ----

    def gather_s(self, num_blocks: int) -> float:
        """Seconds of one kernel that gathers (on the receiver: scatters) all blocks at once."""
        out = torch.empty((num_blocks, self.layout.block_bytes), dtype=torch.uint8, device=self.device)
        blocks = self._permutation(num_blocks, self.options.role)
        if self.options.role == SENDER:
            return best_s(lambda: gather_blocks(self.pool, blocks, out), self.device)
        return best_s(lambda: scatter_blocks(out, self.pool, blocks), self.device)

    def copy_s(self, num_blocks: int) -> float:
        """Seconds of one copy of as many contiguous bytes, to the other GPU if there is one."""
        num_bytes = num_blocks * self.layout.block_bytes
        source = self.source.view(-1)[:num_bytes]
        has_peer = self.device.type == "cuda" and torch.cuda.device_count() > 1
        target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1" if has_peer else self.device)
        return best_s(lambda: target.copy_(source, non_blocking=True), self.device)

    # ---- internals ----

    def _next(self, num_blocks: int) -> tuple[int, tuple[PlannedPart, ...], list[int]]:
        self._leases += 1
        options = self.options
        parts = self._planner.plan(0, num_blocks, 0, options.layer_groups)
        return self._leases, parts, self._permutation(num_blocks, options.role)

    def _permutation(self, num_blocks: int, role: str) -> list[int]:
        """The blocks, in random order, without block 0; sender and receiver use different ones."""
        generator = torch.Generator().manual_seed(2 if role == SENDER else 3)
        order = torch.randperm(self.options.num_blocks - 1, generator=generator)[:num_blocks] + 1
        return [int(block) for block in order]

    def _send_part(self, lease: int, number: int, part: PlannedPart, blocks: list[int]) -> bool:
        named = _named(blocks, part)
        sent: bool = self.mover.send(RECEIVER, lease, number, named, part.kv_slice, self.options.verify)
        return sent

    def _until(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            self._awake.clear()
            if is_over():
                return
            if not self._awake.wait(max(0.0, deadline - time.monotonic())):
                raise TransferFailed(f"it has not ended within {WAIT_S:g} s")

    def _hear(self) -> None:
        """Receive credits, like the thread of a node's streams."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._credits = self._link.recv()
                self._awake.set()


def _named(blocks: list[int], part: PlannedPart) -> list[int]:
    return blocks[part.first : part.first + part.num_blocks]


def _serve(pipe: Connection, link: Connection, options: EndOptions) -> None:
    torch.set_num_threads(1)
    server: Server | Exception
    try:
        server = Server(options, link)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        server = error
    while (call := pipe.recv()) is not None:
        try:
            if isinstance(server, Exception):
                raise server
            pipe.send(getattr(server, call[0])(*call[1]))
        except Exception as error:  # noqa: BLE001 - likewise
            pipe.send(RuntimeError(f"{options.role}: {type(error).__name__} {error}"))
    if isinstance(server, Server):
        server.close()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a process that is started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
