"""The name of one run of a node's process: each start draws another.

That of a data parallel node is `GROUP+RANK`: nodes that divide a mixture's experts among them end together.
"""

from __future__ import annotations

import uuid

_JOINED = "+"


def new_incarnation() -> str:
    """Of a node by itself, or of a group."""
    return uuid.uuid4().hex[:16]


def in_group(group: str, rank: int) -> str:
    return f"{group}{_JOINED}{rank}"


def fate(incarnation: str) -> str:
    """Equal for nodes of which none goes on when one is lost."""
    return incarnation.partition(_JOINED)[0]
