"""What a node keeps free of its pool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node.settings import DecodeSettings
from engine.config import EngineConfig
from engine.model.graphs import decode_capture_sizes, step_padding
from node.ranks.pool_size import graph_bytes
from node.settings import GIB


@pytest.mark.parametrize(("target_itl_s", "vocab_size"), [(None, 128_000), (None, 262_144), (0.02, 152_000)])
def test_memory_is_kept_for_the_logits_of_all_graphs(target_itl_s: float | None, vocab_size: int) -> None:
    """A GiB is enough for 128,000 in 16 bits."""
    limits = EngineConfig(num_blocks=100, max_model_len=600, vocab_size=vocab_size, target_itl_s=target_itl_s)
    limits = replace(limits, padding=step_padding(limits, 512, 1024))
    kept = graph_bytes(DecodeSettings(model="none"), limits, 2 * vocab_size)
    rows = sum(decode_capture_sizes(256)) + sum((places + 8) * len(sizes) for places, sizes in limits.padding.ladders)
    assert kept == max(GIB, GIB // 4 + rows * 2 * vocab_size)
    assert (kept == GIB) == (vocab_size == 128_000)
    one = graph_bytes(DecodeSettings(model="none", cudagraph_capture_sizes="1"), limits, 2 * vocab_size)
    assert one <= kept
