"""What sources of nodes have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.address import HostPort
from baton.node_info import NodeRole


@dataclass(frozen=True, slots=True)
class Member:
    """A node that a router should use. `name`: what its certificate must name in place of the address; empty: that."""

    role: NodeRole
    address: HostPort
    name: str = ""


Found = Callable[[frozenset[Member]], None]


class Source(Protocol):
    """Tells the nodes it knows. `problem`: why it does not know them now, for people; then the last set counts."""

    @property
    def label(self) -> str: ...

    @property
    def problem(self) -> str | None: ...

    async def run(self, found: Found) -> None:
        """Until cancelled: call `found` with all nodes after each look, whether they or the problem changed or not."""
