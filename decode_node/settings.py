"""Settings of `baton-decode`."""

from __future__ import annotations

from typing import ClassVar

from node.settings import NodeSettings


class DecodeSettings(NodeSettings):
    """A decode node: takes over computed prompts and generates their tokens by continuous batching."""

    prog: ClassVar[str] = "baton-decode"

    num_outward_slots: ClassVar[int] = 4
    """For requests that move to another decode node: parts of one are gathered while those of another are sent."""
