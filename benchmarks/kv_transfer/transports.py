"""KV transfer from pool to pool: `python -m benchmarks.kv_transfer.transports`.

Two processes, on two GPUs if there are two, each with a pool of KV blocks in the shape of an 8B model. Scattered blocks
are transferred to other scattered blocks as on a node: gather into slots, transport, scatter out of slots, with
credits, one part at a time. First every byte is compared; then the time from the first part's gather to the end of the
last scatter is measured, and, as ceilings in the same run, one copy of as many contiguous bytes, and the gather and the
scatter alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, field_validator

import kv_transfer
from baton.layout import KvLayout, LayerKv, as_quantized, num_blocks_for
from baton.settings import Settings, Sizes, parse
from benchmarks.harness.tables import Table
from benchmarks.kv_transfer.ends import RECEIVER, SENDER, End, EndOptions, TransferFailed, two_ends
from node.settings import NodeSettings
from node.slots import slot_sizes

GOAL_MS = {2048: 1.0}
"""By tokens: the goal for a transfer over NVLink between two H200s."""
NUM_WARM_UP = 20
"""Transfers that are not measured: the first ones of a size take 3 to 6% longer."""
BETWEEN_PROCESSES = tuple(name for name in kv_transfer.TRANSPORTS if name != "memory")
LLAMA_8B = KvLayout((LayerKv(8, 128, 128, "bfloat16"),) * 32, 16, "shape of Llama 3.1 8B")
QUICK = KvLayout((LayerKv(2, 64, 64, "float32"),) * 4, 16, "a small shape")
QUICK_TOKENS = (16, 100)


class TransferSettings(Settings):
    """Measures the transfer of KV blocks from one process's pool into another's."""

    prog: ClassVar[str] = "benchmarks.kv_transfer.transports"

    transports: str = Field("ucx", description=f"transports to compare, of {', '.join(BETWEEN_PROCESSES)}")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the pools are; auto: cuda, if there")
    num_tokens: Sizes = Field((16, 512, 2048, 32768), description="tokens of each transfer")
    num_tries: int = Field(100, ge=1, description="transfers to take the median of")
    kv_link_bandwidth: float | None = Field(None, gt=0, description="as for a node: GB/s that slots are sized for")
    kv_slots: int | None = Field(None, ge=2, description="as for a node: staging slots at either end")
    kv_slot_blocks: int | None = Field(None, ge=1, description="as for a node: KV blocks in a slot")
    layer_groups: int = Field(1, ge=1, description="groups of layers to send one after the other, as of a last chunk")
    verify_transfers: bool = Field(False, description="with checksums")
    kv_cache_dtype: Literal["auto", "fp8"] = Field("auto", description="of both pools, as for a node")
    quick: bool = Field(False, description="small blocks and few, to see that it works")

    @field_validator("transports")
    @classmethod
    def _known(cls, value: str) -> str:
        for name in value.split(","):
            if name not in BETWEEN_PROCESSES:
                raise ValueError(f"{name!r} is none of {', '.join(BETWEEN_PROCESSES)}")
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds for one transport and size. placed_parts: share of parts gathered directly into the receiver's
    slots."""

    transport: str
    num_tokens: int
    num_bytes: int
    num_parts: int
    placed_parts: float
    median_ms: float
    best_ms: float
    copy_ms: float
    gather_ms: float
    scatter_ms: float

    @property
    def gb_s(self) -> float:
        return self.num_bytes / self.median_ms / 1e6


def run(settings: TransferSettings) -> list[Measured]:
    """Measure all transports and sizes. Raises TransferFailed, also if bytes are wrong."""
    return [x for name in settings.transports.split(",") for x in _one_transport(settings, name)]


def _one_transport(settings: TransferSettings, transport: str) -> list[Measured]:
    sizes = QUICK_TOKENS if settings.quick else settings.num_tokens
    num_blocks = [num_blocks_for(tokens, LLAMA_8B.block_size) for tokens in sizes]
    sender = _options(settings, transport, max(num_blocks))
    gpus = sender.gpus.split(",")
    other = ",".join([*gpus[1:], gpus[0]])
    with two_ends(sender, dataclasses.replace(sender, role=RECEIVER, gpus=other)) as ends:
        _check(ends, num_blocks)
        return [_measure(settings, sender, ends, *size) for size in zip(sizes, num_blocks, strict=True)]


def _options(settings: TransferSettings, transport: str, most_blocks: int) -> EndOptions:
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    layout = QUICK if settings.quick else LLAMA_8B
    if settings.kv_cache_dtype != "auto":
        layout = dataclasses.replace(layout, layers=tuple(map(as_quantized, layout.layers)))
    given = {name: getattr(settings, name) for name in ("kv_link_bandwidth", "kv_slots", "kv_slot_blocks")}
    slots = slot_sizes(NodeSettings(model="none", **given), layout.block_bytes, on_gpu)
    return EndOptions(
        role=SENDER,
        transport=transport,
        layout=layout,
        num_blocks=most_blocks * 5 // 4 + 2,  # and some that are not sent
        num_slots=slots.num_slots,
        part_blocks=slots.part_blocks,
        layer_groups=settings.layer_groups,
        verify=settings.verify_transfers,
        gpus=_two_gpus() if on_gpu else "",
    )


def _two_gpus() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    return ",".join(visible.split(",")[:2])


def _check(ends: tuple[End, End], sizes: Sequence[int]) -> None:
    """A transfer of each size, since each is cut into parts of its own."""
    for num_blocks in sizes:
        ends[1].call("clear")
        _transfer(ends, num_blocks)
        if wrong := ends[1].call("check", num_blocks):
            raise TransferFailed(wrong)


def _transfer(ends: tuple[End, End], num_blocks: int) -> float:
    """Seconds of one transfer. Both processes read the same clock."""
    sender, receiver = ends
    ended, began = receiver.start("receive", num_blocks), sender.start("send", num_blocks)
    return float(-began() + ended())


def _measure(
    settings: TransferSettings, options: EndOptions, ends: tuple[End, End], num_tokens: int, num_blocks: int
) -> Measured:
    sender, receiver = ends
    num_parts, placed_before = sender.call("count_parts", num_blocks), sender.call("count_placed")
    num_transfers = NUM_WARM_UP + settings.num_tries
    took = [_transfer(ends, num_blocks) * 1e3 for _ in range(num_transfers)][NUM_WARM_UP:]
    num_placed = sender.call("count_placed") - placed_before
    return Measured(
        transport=options.transport,
        num_tokens=num_tokens,
        num_bytes=num_blocks * options.layout.block_bytes,
        num_parts=num_parts,
        placed_parts=num_placed / num_transfers / num_parts,
        median_ms=statistics.median(took),
        best_ms=min(took),
        copy_ms=sender.call("copy_s", num_blocks) * 1e3,
        gather_ms=sender.call("gather_s", num_blocks) * 1e3,
        scatter_ms=receiver.call("gather_s", num_blocks) * 1e3,
    )


def report(settings: TransferSettings, measured: Sequence[Measured]) -> None:
    columns = [
        "transport",
        "tokens",
        "MiB",
        "parts",
        "placed",
        "ms",
        "best ms",
        "GB/s",
        "one copy ms",
        "gather ms",
        "scatter ms",
    ]
    rows = [
        [
            *(x.transport, str(x.num_tokens), f"{x.num_bytes / 2**20:.1f}", str(x.num_parts)),
            f"{x.placed_parts:.0%}",
            *(f"{x.median_ms:.3f}", f"{x.best_ms:.3f}", f"{x.gb_s:.1f}"),
            *(f"{ms:.3f}" for ms in (x.copy_ms, x.gather_ms, x.scatter_ms)),
        ]
        for x in measured
    ]
    print(Table(columns, rows).plain())
    line: dict[str, Any] = {
        "benchmark": "kv_transfer",
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())][:2] or ["cpu"],
        "layer_groups": settings.layer_groups,
        "verified": settings.verify_transfers,
        "goal_ms": GOAL_MS,
        "transfers": [dataclasses.asdict(x) | {"gb_s": round(x.gb_s, 2)} for x in measured],
    }
    print(json.dumps(line), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(TransferSettings, argv)
    try:
        report(settings, run(settings))
    except TransferFailed as error:
        sys.exit(f"{settings.prog}: {error}")


if __name__ == "__main__":
    main()
