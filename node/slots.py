"""How large staging slots are, and how many: from what the link between nodes carries.

    bytes of a part  =  link bandwidth x PART_OVERHEAD_S      as long on the wire as what else it costs
    slots            =  link bandwidth x ROUND_TRIP_S / bytes of a part

A part costs a kernel launch and several wake-ups on either side beside its bytes, so smaller ones waste the link; with
larger ones gather, wire and scatter of neighbouring parts overlap less. 2048 tokens of an 8B model take 0.95 to 0.99 ms
over NVLink in 3 parts, 1.0 in 2 or 4, and 1.25 or more in 6 (H200, `ipc`). A slot is taken from the gather until the
peer's next credit could use it, which is a round trip of the control stream, and prompts of several nodes arrive at
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from node.settings import NodeSettings

PART_OVERHEAD_S = 300e-6
ROUND_TRIP_S = 3e-3
MIN_SLOTS = 4

_GPU_LINK_GB_S = 340.0
"""NVLink between two H200s carries 340 to 390 GB/s. Over a slower network the slots are larger than they need to be,
which costs 1 GB of a GPU's memory and nothing else."""
_CPU_LINK_GB_S = 2.0
"""TCP within a machine."""


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """part_blocks: KV blocks that fit into one slot."""

    num_slots: int
    part_blocks: int


def slot_sizes(settings: NodeSettings, block_bytes: int, on_gpu: bool) -> SlotSizes:
    """As told, or as the link wants them."""
    link_gb_s = settings.kv_link_bandwidth or (_GPU_LINK_GB_S if on_gpu else _CPU_LINK_GB_S)
    bytes_per_s = link_gb_s * 1e9
    part_blocks = settings.kv_slot_blocks or max(1, round(bytes_per_s * PART_OVERHEAD_S / block_bytes))
    num_slots = settings.kv_slots or max(MIN_SLOTS, math.ceil(bytes_per_s * ROUND_TRIP_S / (part_blocks * block_bytes)))
    return SlotSizes(num_slots, part_blocks)
