"""A prefill node and a decode node without a model: the real protocol, with tokens from a script at a given pace.

`python -m benchmarks.router.scripted_nodes` prints both addresses, then serves until it is ended. As real nodes do, the
decode node sends what a step gave to all streams of a router in one message, and more than one step's if the router is
late.
A request's `cache_salt` says how its answer comes, in the form `interval_ms=25 start=300`: one token to each stream per
interval, from when so many streams of that form are open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

import engine
from baton import wire
from baton.layout import KvLayout, LayerKv
from baton.messages import (
    Abort,
    Adopted,
    AttemptId,
    Auth,
    End,
    HandedOff,
    Load,
    Prefill,
    SampleEnd,
    Started,
    Subscribe,
    Subscribed,
    Tokens,
    Update,
)
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole
from baton.rpc.channels import SERVER_OPTIONS, bind
from baton.rpc.cluster_secret import SESSION, admit
from baton.sampling import FinishReason
from baton.v1 import node_pb2, node_pb2_grpc
from baton.wire.sessions import write_update
from router.text.tokenizer import Tokenizer

CHECKPOINT = Path(next(iter(engine.__path__))) / "checkpoints" / "baton-tiny"
ANSWER = 'The answer is "42", said the naïve café owner: 你好, 世界 🙂.\nThen he counted: 1 2 3 4 5 6 7 8 9 and so on; '
HEARTBEAT_S = 0.5
UPDATES_PER_MESSAGE = 8192
"""As in `node.sessions`. While so many wait for a router, its streams make no step."""
SETTLE_S = 1.0
"""From when enough streams are open to the first step, so that a measurement can lie between the two."""


def answer_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first tokens of every answer."""
    return list(islice(cycle(tokenizer.encode(ANSWER, False)), count))


@dataclass(frozen=True, slots=True)
class Pace:
    interval_s: float = 0.0
    start: int = 1

    @classmethod
    def of(cls, salt: str) -> Pace:
        said = dict(part.split("=", 1) for part in salt.split())
        return cls(float(said.get("interval_ms", "0")) / 1e3, int(said.get("start", "1")))


class Session:
    """A router's stream on one of the nodes."""

    def __init__(self) -> None:
        self._message = node_pb2.NodeMessage()
        self._something = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self._message.updates.updates) >= UPDATES_PER_MESSAGE

    def put(self, updates: Iterable[node_pb2.Update]) -> None:
        self._message.updates.updates.extend(updates)
        self._something.set()

    async def take(self) -> node_pb2.NodeMessage:
        """What has come since the last call, or after a while the load."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._something.wait()
        except TimeoutError:
            return wire.write_node_message(Load())
        self._something.clear()
        message, self._message = self._message, node_pb2.NodeMessage()
        return message


@dataclass(slots=True, eq=False)
class Stream:
    """One request on the decode node, after its first token."""

    attempt_id: AttemptId
    num_tokens: int
    next_index: int = 1
    update: node_pb2.Update = field(init=False)

    def __post_init__(self) -> None:
        self.update = write_update(Update(self.attempt_id, Tokens(0, 1, (0,))))


class Streams:
    """Those of one session and one pace, which step together."""

    def __init__(self, session: Session, pace: Pace, tokens: list[bytes]) -> None:
        self._session = session
        self._pace = pace
        self._tokens = tokens
        self._running: dict[AttemptId, Stream] = {}
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, stream: Stream) -> None:
        self._running[stream.attempt_id] = stream

    def start(self) -> None:
        self._started.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def discard(self, attempt_id: AttemptId) -> None:
        self._running.pop(attempt_id, None)

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._started.wait()
            if self._pace.start > 1:
                await asyncio.sleep(SETTLE_S)
            due = clock()
            while self._running:
                if not self._session.is_full:
                    self._step()
                due = max(due + self._pace.interval_s, clock() - self._pace.interval_s)
                await asyncio.sleep(due - clock())
            self._started.clear()  # with no await since the last look: what is added from here on starts it again

    def _step(self) -> None:
        """One token to each stream."""
        self._session.put(self._next(stream) for stream in self._running.values())
        ended = [stream for stream in self._running.values() if stream.next_index >= stream.num_tokens]
        for stream in ended:
            del self._running[stream.attempt_id]
            end = SampleEnd(0, FinishReason.LENGTH)
            self._session.put(write_update(Update(stream.attempt_id, kind)) for kind in (end, End()))

    def _next(self, stream: Stream) -> node_pb2.Update:
        tokens = stream.update.tokens
        tokens.first_index = stream.next_index
        tokens.token_ids = self._tokens[stream.next_index % len(self._tokens)]
        stream.next_index += 1
        return stream.update


class Nodes:
    """Both nodes' state: sessions by role and epoch, streams by epoch and pace."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = answer_tokens(tokenizer, len(tokenizer.encode(ANSWER, False)))
        self._wire_tokens = [token.to_bytes(4, "little") for token in self.tokens]
        self.sessions: dict[tuple[NodeRole, int], Session] = {}
        self._streams: dict[tuple[int, Pace], Streams] = {}

    def prefill(self, said: Prefill) -> None:
        """Answer at once with the first token, and hand off."""
        first, epoch = Tokens(0, 0, (self.tokens[0],)), said.attempt_id.router_epoch
        kinds = [Started(0, 0.001), first, HandedOff(0.002, 0.005, 0.006)]
        if said.sampling.max_tokens == 1:
            kinds[2:] = [SampleEnd(0, FinishReason.LENGTH), End()]
        self._put(NodeRole.PREFILL, said.attempt_id, *kinds)
        if said.sampling.max_tokens == 1:
            return
        self._put(NodeRole.DECODE, said.attempt_id, Adopted(0.003, 0, 4096, 0.001, 0.002, 0.004))
        pace = Pace.of(said.cache_salt)
        self._streams_of(epoch, pace).add(Stream(said.attempt_id, said.sampling.max_tokens))
        together = [streams for (_, other), streams in self._streams.items() if other == pace]  # of all workers
        if sum(streams.num_running for streams in together) >= pace.start:
            for streams in together:
                streams.start()

    def abort(self, said: Abort) -> None:
        for (epoch, _), streams in self._streams.items():
            if epoch == said.attempt_id.router_epoch:
                streams.discard(said.attempt_id)

    def lost(self, role: NodeRole, epoch: int) -> None:
        self.sessions.pop((role, epoch), None)
        for key in [key for key in self._streams if key[0] == epoch]:
            self._streams.pop(key).stop()

    def _streams_of(self, epoch: int, pace: Pace) -> Streams:
        key = (epoch, pace)
        if key not in self._streams:
            session = self.sessions[NodeRole.DECODE, epoch]
            self._streams[key] = Streams(session, pace, self._wire_tokens)
        return self._streams[key]

    def _put(self, role: NodeRole, attempt_id: AttemptId, *kinds: Any) -> None:
        self.sessions[role, attempt_id.router_epoch].put(write_update(Update(attempt_id, k)) for k in kinds)


class Servicer(node_pb2_grpc.NodeStatusServicer, node_pb2_grpc.PrefillNodeServicer, node_pb2_grpc.DecodeNodeServicer):
    """The gRPC services of one of the nodes."""

    def __init__(self, nodes: Nodes, info: NodeInfo, tokenizer: bytes) -> None:
        self._nodes = nodes
        self._info = info
        self._tokenizer = tokenizer

    async def Describe(self, request: object, context: object) -> object:  # noqa: N802
        return wire.write_node_info(self._info)

    async def GetTokenizer(self, request: object, context: object) -> AsyncIterator[object]:  # noqa: N802
        yield node_pb2.TokenizerChunk(digest=self._info.tokenizer_digest, data=self._tokenizer)

    async def Session(self, _: object, context: Any) -> None:  # noqa: N802
        async def hear() -> Any:
            return wire.read_router_message(await context.read())

        async def say(message: Auth) -> None:
            await context.write(wire.write_node_message(message))

        _, hello = await admit(None, SESSION, self._info.incarnation, "the router", say, hear)
        assert isinstance(hello, Subscribe)
        session = self._nodes.sessions[self._info.role, hello.router_epoch] = Session()
        await context.write(wire.write_node_message(Subscribed(self._info.incarnation)))
        reading = asyncio.create_task(self._read(context))
        try:
            while not reading.done():
                await context.write(await session.take())
        finally:
            reading.cancel()
            self._nodes.lost(self._info.role, hello.router_epoch)
        reading.result()

    async def _read(self, context: Any) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            for message in wire.split_router_message(request):
                match wire.read_router_message(message):
                    case Prefill() as said:
                        self._nodes.prefill(said)
                    case Abort() as said:
                        self._nodes.abort(said)


async def serve() -> None:
    data = (CHECKPOINT / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer(data)
    nodes = Nodes(tokenizer)
    servers = []
    for role in NodeRole:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        port = bind(server, "127.0.0.1:0", None)
        servicer = Servicer(nodes, scripted_info(role, f"127.0.0.1:{port}", tokenizer), data)
        node_pb2_grpc.add_NodeStatusServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        add = getattr(node_pb2_grpc, f"add_{role.value.capitalize()}NodeServicer_to_server")
        add(servicer, server)
        await server.start()
        servers.append(server)
        print(f"{role.value}=127.0.0.1:{port}", flush=True)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


def scripted_info(role: NodeRole, address: str, tokenizer: Tokenizer) -> NodeInfo:
    """What the node of that role says of itself."""
    return NodeInfo(
        role=role,
        incarnation=f"scripted-{role.value}",
        node_id=f"scripted-{role.value}",
        address=address,
        served_model_name="scripted",
        max_model_len=1_000_000,
        max_num_seqs=4096,
        num_blocks=1_000_000,
        layout=KvLayout((LayerKv(2, 32, 32, "float32"),) * 4, 16, "scripted"),
        endpoints=(),
        tokenizer_digest=tokenizer.digest,
        chat_template=(CHECKPOINT / "chat_template.jinja").read_text(),
        special_tokens={},
        generation_defaults=GenerationDefaults(),
        vocab_size=100_000,
    )


def main() -> None:
    uvloop.run(serve())


if __name__ == "__main__":
    main()
