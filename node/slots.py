"""The size and number of staging slots, derived from the bandwidth of the link between nodes.

    bytes of a part  =  link bandwidth x PART_OVERHEAD_S      its time on the wire equals its overhead
    slots            =  link bandwidth x ROUND_TRIP_S / bytes of a part

Besides its bytes, a part costs a kernel launch and several wake-ups on either side, so smaller parts waste the link;
with larger ones, gather, wire and scatter of neighbouring parts overlap less. 2048 tokens of an 8B model take 0.95 to
0.99 ms over NVLink in 3 parts, 1.0 in 2 or 4, and 1.25 or more in 6 (H200, `ipc`). A slot is in use from the gather
until the peer's next credit could use it, which is a round trip of the control stream, and prompts from several nodes
arrive at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from node.settings import NodeSettings

PART_OVERHEAD_S = 300e-6
ROUND_TRIP_S = 3e-3
MIN_SLOTS = 4

_GPU_LINK_GB_S = 340.0
"""NVLink between two H200s carries 340 to 390 GB/s. On a slower network the slots are larger than necessary, which
costs 1 GB of GPU memory and nothing else."""
_CPU_LINK_GB_S = 2.0
"""TCP within a machine."""


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """part_blocks: KV blocks that fit into one slot."""

    num_slots: int
    part_blocks: int


def slot_sizes(settings: NodeSettings, block_bytes: int, on_gpu: bool) -> SlotSizes:
    """The sizes that are set, or those that suit the link. block_bytes: of a rank, since each has a link of its own."""
    link_gb_s = settings.kv_link_bandwidth or (_GPU_LINK_GB_S if on_gpu else _CPU_LINK_GB_S)
    bytes_per_s = link_gb_s * 1e9
    part_blocks = settings.kv_slot_blocks or max(1, round(bytes_per_s * PART_OVERHEAD_S / block_bytes))
    num_slots = settings.kv_slots or max(MIN_SLOTS, math.ceil(bytes_per_s * ROUND_TRIP_S / (part_blocks * block_bytes)))
    return SlotSizes(num_slots, part_blocks)
