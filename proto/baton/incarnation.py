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


def failure_domain(incarnation: str) -> str:
    """Equal for nodes that all end when one of them is lost: the group of data parallel nodes, else the node itself."""
    return incarnation.partition(_JOINED)[0]
