"""Settings of `baton-prefill`."""

from __future__ import annotations

from typing import ClassVar

from node.settings import NodeSettings


class PrefillSettings(NodeSettings):
    """A prefill node: computes the KV caches of prompts in chunks and hands them over to decode nodes."""

    prog: ClassVar[str] = "baton-prefill"

    gpu_batched_tokens: ClassVar[int] = 8192
    """For chunks of long prompts, whose attention is faster in large pieces."""
    saturating_num_tokens: ClassVar[int | None] = 1024
    """From here on, batching more queued prompts gains nothing: matmuls run at the GPU's peak (an H200 takes 23.5 ms
    for 1024 tokens of an 8B model and 46.6 ms for 2048), and the first prompt would wait for the second."""
    captured_prompt_tokens: ClassVar[int] = 2048
    """Without a graph, a step takes the engine's thread so long to launch that finished KV is sent late."""
    captured_mixed_tokens: ClassVar[int] = 0
    has_streams: ClassVar[bool] = False
