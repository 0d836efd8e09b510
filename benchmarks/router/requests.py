"""What one request costs within the router's own code: `python -m benchmarks.router.requests`.

Everything from the bytes of an HTTP request to those of its answer runs in this process, without sockets: a connection
is fed by hand, and messages to and from nodes are serialized and parsed, but take no way. So the figure has no part of
the kernel, of gRPC's threads or of other processes, and is much the same on a busy machine.
`benchmarks.router.streams` measures the whole of a router process. Every answer is checked.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import json
import os
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import uvloop
from pydantic import Field

from baton import wire
from baton.log_levels import LogLevels
from baton.messages import Abort, Adopted, End, HandedOff, Load, Migrate, Prefill, SampleEnd, Started, Tokens, Update
from baton.node_info import NodeRole
from baton.sampling import FinishReason
from baton.settings import Settings, parse
from baton.telemetry import configure_logging
from baton.v1 import node_pb2
from benchmarks.harness.tables import Table
from benchmarks.router.scripted_nodes import CHECKPOINT, answer_tokens, scripted_info
from benchmarks.router.stream_clients import Answer, chat_request
from benchmarks.router.streams import PROMPT
from router.http.server import HttpServer
from router.server import RouterServer
from router.settings import RouterSettings
from router.text.tokenizer import Tokenizer

MAX_TURNS = 1000
"""Of the event loop for one request."""


class RequestsSettings(Settings):
    """Measures the CPU time of one request after another in the router's own code."""

    prog: ClassVar[str] = "benchmarks.router.requests"

    num_requests: int = Field(1000, ge=1, description="requests of each round")
    num_rounds: int = Field(5, ge=1, description="rounds, of which the medians count")
    output_len: int = Field(2, ge=2, description="tokens of each answer, each a message of its own")
    profile: int = Field(0, ge=0, description="instead: so many functions that take longest, with a profiler")


class Pipe(asyncio.Transport):
    """A client's connection, whose bytes stay here."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.parts: list[bytes] = []

    def write(self, data: Any) -> None:
        self.parts.append(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Router:
    """A router without ports, between a pipe and nodes that answer at once."""

    def __init__(self, output_len: int) -> None:
        self.tokenizer = Tokenizer((CHECKPOINT / "tokenizer.json").read_bytes())
        self.tokens = answer_tokens(self.tokenizer, output_len)
        self._server = RouterServer(
            RouterSettings.model_validate({"prefill": ["localhost:1"], "decode": ["localhost:2"]})
        )
        self._messages: list[tuple[str, bytes]] = []
        for role in NodeRole:
            info = scripted_info(role, "localhost:1", self.tokenizer)
            self._server.models.join(info, self.tokenizer, f"localhost:{role.value}")
            self._server.dispatcher.node_up(info, self._sent)
            self._server.dispatcher.handle_node_message(info.incarnation, Load())
        http = HttpServer(self._server.app, self._server.limits)
        http.config.load()
        self.pipe = Pipe()
        self._connection = http.connection()
        self._connection.connection_made(self.pipe)

    def _sent(self, message: Prefill | Abort | Migrate) -> None:
        """What a node does with it: a message for each step."""
        parsed = node_pb2.RouterMessage.FromString(wire.write_router_message(message).SerializeToString())
        assert isinstance(message, Prefill)
        assert parsed.prefill.prompt_tokens
        attempt_id, last = message.attempt_id, len(self.tokens) - 1
        first = (Started(0, 0.001), Tokens(0, 0, (self.tokens[0],)), HandedOff(0.002, 0.005, 0.006))
        self._say("scripted-prefill", attempt_id, first)
        self._say("scripted-decode", attempt_id, (Adopted(0.003, 0, 4096, 0.001, 0.002, 0.004),))
        for index in range(1, last + 1):
            ends = (SampleEnd(0, FinishReason.LENGTH), End()) if index == last else ()
            self._say("scripted-decode", attempt_id, (Tokens(0, index, (self.tokens[index],)), *ends))

    def _say(self, node: str, attempt_id: Any, kinds: Sequence[Any]) -> None:
        message = wire.write_node_message(tuple(Update(attempt_id, kind) for kind in kinds))
        self._messages.append((node, message.SerializeToString()))

    async def ask(self, request: bytes) -> bytes:
        """The bytes of the answer."""
        self.pipe.parts.clear()
        self._connection.data_received(request)
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
            if self._messages:
                node, data = self._messages.pop(0)
                message: Any = wire.read_node_message(node_pb2.NodeMessage.FromString(data))
                self._server.dispatcher.handle_node_message(node, message)
            elif self.pipe.parts and self.pipe.parts[-1].endswith(b"0\r\n\r\n"):
                return b"".join(self.pipe.parts)
        raise RuntimeError(f"no answer: {b''.join(self.pipe.parts)!r}")


async def measure(settings: RequestsSettings) -> list[float]:
    """Microseconds of CPU time per request, of each round."""
    with open(os.devnull, "w") as nowhere:  # noqa: ASYNC230, PTH123  (a device)
        configure_logging(LogLevels(), "router", nowhere)
        return await _measure(settings)


async def _measure(settings: RequestsSettings) -> list[float]:
    router = Router(settings.output_len)
    request = chat_request(PROMPT, settings.output_len, None)
    expected = router.tokenizer.decode(router.tokens)
    Answer(0.0, 0.0, await router.ask(request)).check(expected)
    gc.freeze()
    found = []
    profiler = cProfile.Profile()
    for _ in range(settings.num_rounds):
        began = time.process_time()
        if settings.profile:
            profiler.enable()
        for _ in range(settings.num_requests):
            answer = await router.ask(request)
        profiler.disable()
        found.append((time.process_time() - began) / settings.num_requests * 1e6)
        Answer(0.0, 0.0, answer).check(expected)
    if settings.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(settings.profile)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(RequestsSettings, argv)
    found = uvloop.run(measure(settings))
    median = statistics.median(found)
    rows = [["CPU per request, us", f"{median:.0f}", f"{min(found):.0f}", f"{max(found):.0f}"]]
    print(Table(["", "median", "least", "most"], rows).plain())
    figures = {"output_len": settings.output_len, "us_per_request": round(median, 1)}
    print(json.dumps({"benchmark": "router_requests", **figures}), flush=True)


if __name__ == "__main__":
    main()
