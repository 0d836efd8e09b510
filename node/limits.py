"""How long the processes of a node, and the nodes that compute together, wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts in seconds. A part is a rank, another host of the node, or another data parallel node. join: until all
    parts have connected. silence: a part that sends nothing for so long is taken to hang; loading_silence: the same
    while some part imports or loads, which may hold the GIL. report: when a part is lost while the node starts, how
    long this process waits for the error that explains it. close: how long ranks may take to end by themselves."""

    join: float = 300.0
    silence: float = 5.0
    loading_silence: float = 60.0
    report: float = 5.0
    close: float = 5.0

    @classmethod
    def of(cls, settings: NodeSettings) -> Limits:
        return cls(silence=settings.silence_timeout, join=settings.distributed_timeout_seconds)
