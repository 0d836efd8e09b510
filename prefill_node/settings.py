"""Settings of `baton-prefill`."""

from __future__ import annotations

from typing import ClassVar

from node.settings import NodeSettings


class PrefillSettings(NodeSettings):
    """A prefill node: computes the KV caches of prompts in chunks and hands them over to decode nodes."""

    prog: ClassVar[str] = "baton-prefill"

    gpu_batched_tokens: ClassVar[int] = 8192
    """For chunks of long prompts: their attention is quicker in large pieces."""
    saturating_num_tokens: ClassVar[int | None] = 1024
    """Prompts that queue get no quicker together: from here on matmuls are at a GPU's peak (1024 tokens of an 8B model
    take an H200 23.5 ms, 2048 take it 46.6), and the first would wait for the second."""
    captured_prompt_tokens: ClassVar[int] = 2048
    """What it launches meanwhile keeps KV waiting that could leave."""
    captured_mixed_tokens: ClassVar[int] = 0
