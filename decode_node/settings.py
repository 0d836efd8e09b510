"""Settings of `baton-decode`."""

from __future__ import annotations

from typing import ClassVar

from node.settings import NodeSettings


class DecodeSettings(NodeSettings):
    """A decode node: takes over computed prompts and generates their tokens by continuous batching."""

    prog: ClassVar[str] = "baton-decode"
