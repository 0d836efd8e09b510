"""The two ends of a transfer: a pool of KV blocks, staging slots and a node's mover over a transport.

The receiver expects all parts, the sender pushes them, as a prefill node does. There are as many slots as parts, so no
credits go to and fro. Before anything is timed every block's checksum is compared.
"""

from __future__ import annotations

import base64
import contextlib
import random
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import kv_transfer
from baton.errors import TransferError
from baton.layout import KvLayout, LayerKv
from baton.rpc.cluster_secret import ClusterSecret
from deploy.doctor.transfer.control import Control, TestFailed
from kv_transfer.parts import PartPlanner, PlannedPart, slot_bytes_for
from kv_transfer.receiver import KvReceiver, PartLanded
from kv_transfer.sender import KvSender, PartSent
from kv_transfer.transports.host import boot_id
from node.settings import NodeSettings
from node.slots import slot_sizes
from node.wakeup import Wakeup

LAYOUT = KvLayout((LayerKv(8, 128, 128, "bfloat16"),) * 32, 16, "shape of Llama 3.1 8B")
GPU_MIB, CPU_MIB = 512, 64
MAX_MIB = 4096
ONE_GPU_GB_S = 340.0
"""Both ends on one GPU have no link between them: launches bound them, as over NVLink, and not its memory."""
_NUM_WARM_UP, _NUM_TIMED = 2, 7
_TIMED_S = 3.0
"""No transfer begins later than that."""
_SEED = 20


@dataclass(frozen=True, slots=True)
class Options:
    """The transport, as for `kv_transfer.create`; num_blocks: to move each time."""

    transport: str
    device: str
    num_blocks: int
    interface: str | None = None
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Measured:
    """gb_s: the median. copy_gb_s: of one copy of as many bytes, on a GPU to the other end's if it is of this host."""

    gb_s: float
    copy_gb_s: float
    num_bytes: int


class End:
    """A pool, slots, and a mover of `kind` over them. Raises TransferError."""

    def __init__(self, kind: type[KvSender] | type[KvReceiver], options: Options, secret: ClusterSecret | None) -> None:
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.num_blocks = options.num_blocks
        part_blocks = slot_sizes(NodeSettings(model="none"), LAYOUT.block_bytes, self.device.type == "cuda").part_blocks
        self.parts = PartPlanner(LAYOUT, LAYOUT, (part_blocks, part_blocks)).plan(0, options.num_blocks)
        generator = torch.Generator().manual_seed(_SEED)
        shape = (options.num_blocks + 1, LAYOUT.block_bytes)
        self.pool = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(self.device)
        slot_bytes = slot_bytes_for(part_blocks, LAYOUT.block_bytes)
        staging = kv_transfer.staging_for(options.transport, max(2, len(self.parts)), slot_bytes, self.device)
        self._awake = Wakeup()
        where = options.interface, options.host, secret
        self.transport = kv_transfer.create(options.transport, staging, self._awake.set, *where)
        self.mover: Any = kind(self.transport, staging, self.pool, LAYOUT)
        self.mover.warm_up()
        _synchronize(self.device)

    def order(self, seed: int) -> list[int]:
        """The blocks of the pool in random order, without block 0."""
        return random.Random(seed).sample(range(1, self.num_blocks + 1), self.num_blocks)

    def checksums(self, blocks: list[int]) -> list[int]:
        return [zlib.crc32(self.pool[block].cpu().numpy().tobytes()) for block in blocks]

    def until(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Raises TestFailed."""
        while True:
            self._awake.clear()
            if is_over():
                return
            if not self._awake.wait(max(0.0, deadline - time.monotonic())):
                raise TestFailed("the transfer has not ended in time")


@contextlib.contextmanager
def _open(kind: type[KvSender] | type[KvReceiver], options: Options, secret: ClusterSecret | None) -> Iterator[End]:
    try:
        end = End(kind, options, secret)
    except TransferError as error:
        raise TestFailed(f"--transport {options.transport} cannot be used here: {error.message}") from None
    try:
        yield end
    finally:
        end.transport.close()


# ---- the sender ----


def send(control: Control, options: Options, secret: ClusterSecret | None) -> Measured:
    """Move blocks to the other end, compare, measure. Raises TestFailed."""
    with _open(KvSender, options, secret) as end:
        address = _pack(end.transport.info())
        control.say(transport=options.transport, num_blocks=options.num_blocks, boot=boot_id(), address=address)
        answer = control.hear()
        _connect(end, "receiver", answer)
        control.hear()  # the other end is connected too
        sends = _Sends(end, control)
        sends.run()
        control.say(check=end.checksums(sends.blocks))
        if damaged := control.hear().get("damaged"):
            raise TestFailed(f"{damaged} of {options.num_blocks} KV blocks did not arrive as they were sent")
        took_s = _timed(sends.run)
        control.say(done=True)
        num_bytes = options.num_blocks * LAYOUT.block_bytes
        copy_gb_s = num_bytes / _copy_s(end, answer.get("gpu")) / 1e9
        if end.device.type == "cuda" and answer.get("gpu") == end.device.index:
            copy_gb_s = min(copy_gb_s, ONE_GPU_GB_S)
        rates = [num_bytes / seconds / 1e9 for seconds in took_s]
        return Measured(statistics.median(rates), copy_gb_s, num_bytes)


class _Sends:
    """Transfers of all blocks, one after the other."""

    def __init__(self, end: End, control: Control) -> None:
        self.blocks = end.order(1)
        self._end, self._control = end, control
        self._lease = 0

    def run(self) -> float:
        """Seconds of one, from the first part's gather to the word that the last one is in its blocks."""
        end, parts = self._end, self._end.parts
        self._lease += 1
        self._control.say(expect=self._lease)
        self._control.hear()  # it does
        began = time.perf_counter()
        num_sent = num_gone = 0

        def go_on() -> bool:
            nonlocal num_sent, num_gone
            for event in end.mover.poll():
                if not isinstance(event, PartSent):
                    raise TestFailed(f"a part was not sent: {event.reason}")
                num_gone += 1
            with end.mover.batched():
                while num_sent < len(parts) and self._send(num_sent, parts[num_sent]):
                    num_sent += 1
            return num_gone == len(parts)

        end.until(go_on, self._control.deadline)
        self._control.hear()  # all have landed
        return time.perf_counter() - began

    def _send(self, number: int, part: PlannedPart) -> bool:
        blocks = self.blocks[part.first : part.first + part.num_blocks]
        return bool(self._end.mover.send("receiver", self._lease, number, blocks, part.kv_slice))


def _timed(run: Callable[[], float]) -> list[float]:
    for _ in range(_NUM_WARM_UP):
        run()
    took_s, end = [run()], time.monotonic() + _TIMED_S
    while len(took_s) < _NUM_TIMED and time.monotonic() < end:
        took_s.append(run())
    return took_s


def _copy_s(end: End, other_gpu: object) -> float:
    """Seconds of the fastest of a few copies."""
    source = end.pool[: end.num_blocks]
    same_host = isinstance(other_gpu, int) and other_gpu < torch.cuda.device_count()
    target = torch.empty_like(source, device=f"cuda:{other_gpu}" if same_host else end.device)
    best_s = float("inf")
    for _ in range(4):
        _synchronize(end.device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronize(end.device)
        best_s = min(best_s, time.perf_counter() - began)
    return best_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the receiver ----


def receive(control: Control, device: str, interface: str | None, host: str, secret: ClusterSecret | None) -> None:
    """Serve one `send`. device: as for a node. Raises TestFailed, having said why."""
    try:
        asked = control.hear()
        options = _asked(asked, device, interface, host)
        with _open(KvReceiver, options, secret) as end:
            end.pool.zero_()
            _synchronize(end.device)
            gpu = end.device.index if asked.get("boot") == boot_id() else None
            control.say(address=_pack(end.transport.info()), gpu=gpu)
            _connect(end, "sender", asked)
            control.say(connected=True)
            _serve(end, control)
    except TestFailed as error:
        with contextlib.suppress(TestFailed):
            control.say(error=str(error))
        raise


def _asked(asked: dict[str, Any], device: str, interface: str | None, host: str) -> Options:
    """Checked as what a stranger says. Raises TestFailed."""
    transport, num_blocks = asked.get("transport"), asked.get("num_blocks")
    if transport not in kv_transfer.TRANSPORTS:
        raise TestFailed(f"there is no transport {transport!r}")
    if not isinstance(num_blocks, int) or not 0 < num_blocks * LAYOUT.block_bytes <= MAX_MIB << 20:
        raise TestFailed(f"{num_blocks!r} blocks, where 1 to {(MAX_MIB << 20) // LAYOUT.block_bytes} can be moved")
    if device != "cpu" and torch.cuda.is_available():
        index = torch.cuda.device_count() - 1 if asked.get("boot") == boot_id() else 0  # the sender's is the first
        return Options(str(transport), f"cuda:{index}", num_blocks, interface, host)
    return Options(str(transport), "cpu", num_blocks, interface, host)


def _serve(end: End, control: Control) -> None:
    blocks = end.order(2)
    while True:
        message = control.hear()
        if "expect" in message:
            _take(end, control, int(message["expect"]), blocks)
        elif "check" in message:
            pairs = zip(message["check"], end.checksums(blocks), strict=False)
            control.say(damaged=sum(sent != landed for sent, landed in pairs))
        else:
            return


def _take(end: End, control: Control, lease: int, blocks: list[int]) -> None:
    granted = end.mover.mark()
    for number, part in enumerate(end.parts):
        named = blocks[part.first : part.first + part.num_blocks]

        def is_expected(number: int = number, part: PlannedPart = part, named: list[int] = named) -> bool:
            is_last = number + 1 == len(end.parts)
            return bool(end.mover.expect("sender", lease, number, named, part.kv_slice, granted, is_last))

        end.until(is_expected, control.deadline)
    control.say(expected=True)
    num_landed = 0

    def all_landed() -> bool:
        nonlocal num_landed
        for event in end.mover.poll():
            if not isinstance(event, PartLanded):
                reason = getattr(event, "reason", None) or getattr(getattr(event, "error", None), "message", event)
                raise TestFailed(f"a part did not arrive: {reason}")
            num_landed += 1
        return num_landed == len(end.parts)

    end.until(all_landed, control.deadline)
    _synchronize(end.device)
    control.say(landed=True)


def _connect(end: End, peer: str, message: dict[str, Any]) -> None:
    try:
        end.transport.connect(peer, base64.b64decode(str(message.get("address"))))
    except (TransferError, ValueError) as error:
        raise TestFailed(f"the two transports do not connect: {error}") from None


def _pack(address: bytes) -> str:
    return base64.b64encode(address).decode()
