"""What `benchmarks.serving.failover` asks of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.address import HostPort
from benchmarks.harness.http_stream import Connection, Streamed
from benchmarks.serving.failover import _stream_all


class Asked(Connection):
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        super().__init__(HostPort("127.0.0.1", 1))
        self.bodies = list[Mapping[str, Any]]()

    async def stream(self, path: str, body: Mapping[str, Any], answer: Streamed | None = None) -> Streamed:
        self.bodies.append(body)
        return answer or Streamed(0.0)


async def test_no_node_has_an_answer_from_the_undisturbed_run() -> None:
    """Or it would not compute it again, and the pause would be half as long."""
    connections, bodies = [Asked(), Asked()], [{"prompt": [5]}, {"prompt": [6]}]
    for _ in range(2):
        await _stream_all(connections, bodies, [Streamed(0.0) for _ in bodies])
    asked = [body for connection in connections for body in connection.bodies]
    assert [body["prompt"] for body in asked] == [[5], [5], [6], [6]]
    assert len({body["cache_salt"] for body in asked}) == 4
