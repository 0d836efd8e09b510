"""Settings of `baton-prefill`."""

from __future__ import annotations

from typing import ClassVar

from engine.node.settings import NodeSettings


class PrefillSettings(NodeSettings):
    """A prefill node: computes the KV caches of prompts in chunks and hands them over to decode nodes."""

    prog: ClassVar[str] = "baton-prefill"

    gpu_batched_tokens: ClassVar[int] = 8192
    """Long enough chunks for the matmuls to reach a GPU's peak."""
