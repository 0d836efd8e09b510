"""Settings of `baton-prefill`."""

from __future__ import annotations

from typing import ClassVar

from engine.node.settings import NodeSettings


class PrefillSettings(NodeSettings):
    """A prefill node: computes the KV caches of prompts in chunks and hands them over to decode nodes."""

    prog: ClassVar[str] = "baton-prefill"

    gpu_batched_tokens: ClassVar[int] = 8192
    """For chunks of long prompts: their attention is quicker in large pieces."""
    saturating_num_tokens: ClassVar[int | None] = 2048
    """Prompts that queue get no quicker together: from here on matmuls are at a GPU's peak."""
