"""Nodes that answer by a script: real gRPC servers with the real messages, and no model behind them."""

import array
import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from baton import wire
from baton.address import HostPort
from baton.errors import BatonError
from baton.layout import KvLayout, LayerKv
from baton.messages import (
    Abort,
    Adopted,
    AttemptId,
    Auth,
    End,
    HandedOff,
    KvEvents,
    Load,
    Prefill,
    Sample,
    SampleEnd,
    Started,
    Subscribe,
    Subscribed,
    TokenLogprobs,
    Tokens,
    Update,
)
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole
from baton.prompt_logprobs import PromptLogprobs
from baton.rpc.channels import SERVER_OPTIONS, bind
from baton.rpc.cluster_secret import SESSION, NotTrusted, admit
from baton.rpc.trust import Trust
from baton.sampling import FinishReason
from baton.v1 import node_pb2, node_pb2_grpc
from deploy.ports import HeldPort
from tests.router.tiny_tokenizer import (
    CHAT_TEMPLATE,
    EOT,
    IM_END,
    SPECIAL_TOKENS,
    tiny_tokenizer,
    tokenizer_json,
    vocab_size,
)

HEARTBEAT_S = 0.2
PATIENCE_S = 20.0
LAYOUT = KvLayout((LayerKv(2, 32, 32, "float32"),) * 4, 16, "fingerprint")


@dataclass
class Answer:
    """What the nodes do with one request. `tokens[s]` are all of sample s; a list too short for it serves all samples.

    The answer ends with STOP after its tokens, or with LENGTH at max_tokens. `hold` stops before token `hold_at`.
    """

    tokens: Sequence[Sequence[int]] = ((),)
    stop_token_id: int | None = None
    error: BatonError | None = None
    hold: asyncio.Event | None = None
    hold_at: int = 0
    num_cached_tokens: int = 0


class FakeCluster:
    """Some prefill and decode nodes; `script` tells what becomes of a Prefill."""

    def __init__(self, script: Callable[[Prefill], Answer]) -> None:
        self.script = script
        self.nodes: list[FakeNode] = []
        self.prefills: list[Prefill] = []
        self.aborts: list[Abort] = []
        self._news = asyncio.Event()

    async def add(self, role: NodeRole, **changes: Any) -> "FakeNode":
        node = FakeNode(self, role, len(self.nodes))
        self.nodes.append(node)
        await node.start(**changes)
        return node

    def addresses(self, role: NodeRole) -> tuple[HostPort, ...]:
        return tuple(HostPort.parse(node.info.address) for node in self.nodes if node.info.role is role)

    def node(self, incarnation: str) -> "FakeNode":
        return next(node for node in self.nodes if node.info.incarnation == incarnation)

    def tell(self) -> None:
        """Something has happened."""
        self._news.set()

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for nodes to have got or sent something."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def close(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))
        for node in self.nodes:
            node.port.close()


@dataclass
class _Session:
    """One router's stream on one node."""

    outgoing: asyncio.Queue[node_pb2.NodeMessage] = field(default_factory=asyncio.Queue)

    def send(self, *updates: Update) -> None:
        self.outgoing.put_nowait(wire.write_node_message(updates))


class FakeNode(node_pb2_grpc.NodeStatusServicer, node_pb2_grpc.PrefillNodeServicer, node_pb2_grpc.DecodeNodeServicer):
    def __init__(self, cluster: FakeCluster, role: NodeRole, number: int) -> None:
        self._cluster = cluster
        self._role = role
        self._number = number
        self._starts = 0
        self.port = HeldPort(HostPort("127.0.0.1", 0))  # so that nobody else gets it while it restarts
        self.sessions: dict[int, _Session] = {}
        self._attempts: dict[AttemptId, asyncio.Task[None]] = {}
        self._stopped_samples: set[tuple[AttemptId, int]] = set()
        self.silent = False
        self.load = Load()
        """What each heartbeat says."""
        self.trust = Trust()
        self.num_sent_tokens = 0
        self.num_sessions = 0
        self.tokenizer_fetches = 0
        self.sends_tokenizer = asyncio.Event()
        self.sends_tokenizer.set()

    async def start(self, **changes: Any) -> None:
        self._starts += 1
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        node_pb2_grpc.add_NodeStatusServicer_to_server(self, self._server)
        add = (
            node_pb2_grpc.add_PrefillNodeServicer_to_server
            if self._role is NodeRole.PREFILL
            else node_pb2_grpc.add_DecodeNodeServicer_to_server
        )
        add(self, self._server)
        port = bind(self._server, str(self.port.address), self.trust.tls)
        name = f"{self._role.value}-{self._number}"
        self.info = dataclasses.replace(node_info(self._role, name, f"127.0.0.1:{port}"), **changes)
        self.info = dataclasses.replace(self.info, incarnation=f"{name}.{self._starts}")
        await self._server.start()

    async def stop(self) -> None:
        for task in self._attempts.values():
            task.cancel()
        self.sessions.clear()
        await self._server.stop(None)

    async def restart(self, **changes: Any) -> None:
        """Die and come back, as another incarnation at the same address."""
        await self.stop()
        await self.start(**changes)

    # ---- services ----

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> object:  # noqa: N802
        return wire.write_node_info(self.info)

    async def GetTokenizer(self, request: object, context: object) -> AsyncIterator[node_pb2.TokenizerChunk]:  # noqa: N802
        self.tokenizer_fetches += 1
        data = tokenizer_json()
        for start in range(0, len(data), 4096):
            yield node_pb2.TokenizerChunk(digest=self.info.tokenizer_digest, data=data[start : start + 4096])
            await self.sends_tokenizer.wait()

    async def Session(self, _: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        async def hear() -> object:
            return wire.read_router_message(await context.read())

        async def say(message: Auth) -> None:
            await context.write(wire.write_node_message(message))

        try:
            _, hello = await admit(self.trust.secret, SESSION, self.info.incarnation, "the router", say, hear)
        except NotTrusted as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        assert isinstance(hello, Subscribe)
        if hello.target_incarnation != self.info.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        session = self.sessions[hello.router_epoch] = _Session()
        self.num_sessions += 1
        await context.write(wire.write_node_message(Subscribed(self.info.incarnation)))
        reading = asyncio.create_task(self._read(context))
        try:
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        message = await session.outgoing.get()
                except TimeoutError:
                    message = wire.write_node_message(self.load)
                if not self.silent:
                    await context.write(message)
        finally:
            reading.cancel()
            self.sessions.pop(hello.router_epoch, None)

    async def _read(self, context: grpc.aio.ServicerContext) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            for message in map(wire.read_router_message, wire.split_router_message(request)):
                if isinstance(message, Prefill):
                    message = dataclasses.replace(message, prompt_tokens=tuple(message.prompt_tokens))
                    self._cluster.prefills.append(message)
                    self._cluster.tell()
                    self._attempts[message.attempt_id] = asyncio.create_task(self._answer(message))
                elif isinstance(message, Abort):
                    self._cluster.aborts.append(message)
                    self._cluster.tell()
                    self._abort(message)

    def _abort(self, abort: Abort) -> None:
        if abort.samples:
            self._stopped_samples |= {(abort.attempt_id, sample) for sample in abort.samples}
        for node in self._cluster.nodes:
            if not abort.samples and (task := node._attempts.get(abort.attempt_id)):
                task.cancel()

    # ---- the life of one request, on both nodes ----

    async def _answer(self, prefill: Prefill) -> None:
        answer = self._cluster.script(prefill)
        own, attempt_id, epoch = self, prefill.attempt_id, prefill.attempt_id.router_epoch
        decode = self._cluster.node(prefill.decode.incarnation) if prefill.decode else self
        if answer.hold and answer.hold_at == 0:
            await answer.hold.wait()
        own._send(epoch, Update(attempt_id, Started(answer.num_cached_tokens, 0.001)))
        own._send(epoch, *(Update(attempt_id, piece) for piece in prompt_pieces(prefill)))
        if answer.error:
            own._send(epoch, Update(attempt_id, End(answer.error)))
            return
        open_samples = [s for s in prefill.samples if not own._step(prefill, answer, s, len(s.output_tokens))]
        if decode is not own:
            own._send(epoch, Update(attempt_id, HandedOff(0.002, 0.005, 0.006)))
            decode._send(epoch, Update(attempt_id, Adopted(0.003, 0, 4096, 0.001, 0.002, 0.004)))
        index = len(prefill.samples[0].output_tokens) + 1
        while open_samples:
            if answer.hold and answer.hold_at == index:
                await answer.hold.wait()
            open_samples = [s for s in open_samples if not decode._step(prefill, answer, s, index)]
            index += 1
        decode._send(epoch, Update(attempt_id, End()))

    def _step(self, prefill: Prefill, answer: Answer, sample: Sample, index: int) -> bool:
        """Send one token of one sample, and maybe its end. True: it has ended."""
        attempt_id = prefill.attempt_id
        if (attempt_id, sample.index) in self._stopped_samples:
            return True
        tokens = answer.tokens[sample.index % len(answer.tokens)]
        token = tokens[index]
        logprobs = (
            (TokenLogprobs(-0.5, ((token, -0.5), (7, -1.5))[: prefill.sampling.num_logprobs]),)
            if prefill.sampling.num_logprobs >= 0
            else ()
        )
        updates = [Update(attempt_id, Tokens(sample.index, index, (token,), logprobs))]
        if index + 1 == len(tokens):
            updates.append(Update(attempt_id, SampleEnd(sample.index, FinishReason.STOP, answer.stop_token_id)))
        elif index + 1 == prefill.sampling.max_tokens:
            updates.append(Update(attempt_id, SampleEnd(sample.index, FinishReason.LENGTH)))
        self._send(attempt_id.router_epoch, *updates)
        return len(updates) > 1

    @property
    def host_port(self) -> HostPort:
        return HostPort.parse(self.info.address)

    def publish(self, events: KvEvents) -> None:
        """To every router."""
        for session in self.sessions.values():
            session.outgoing.put_nowait(wire.write_node_message(events))

    def _send(self, epoch: int, *updates: Update) -> None:
        self.num_sent_tokens += sum(isinstance(update.kind, Tokens) for update in updates)
        self._cluster.tell()
        if session := self.sessions.get(epoch):
            session.send(*updates)


def prompt_pieces(prefill: Prefill, size: int = 4) -> list[PromptLogprobs]:
    """The i-th token of the prompt has logprob -i and rank i, and 7, 8, ... are the most likely tokens."""
    num_top, pieces = prefill.sampling.num_prompt_logprobs, list[PromptLogprobs]()
    if num_top is None:
        return []
    for first in range(1, len(prefill.prompt_tokens), size):
        indexes = range(first, min(first + size, len(prefill.prompt_tokens)))
        own = [
            array.array(kind, values).tobytes()
            for kind, values in (("f", [-float(i) for i in indexes]), ("I", indexes))
        ]
        ids = array.array("I", [(7 + j) % vocab_size() for _ in indexes for j in range(num_top)]).tobytes()
        values = array.array("f", [-0.25 * (1 + j) for _ in indexes for j in range(num_top)]).tobytes()
        pieces.append(PromptLogprobs(first, num_top, own[0], own[1], ids, values))
    return pieces


def node_info(role: NodeRole, node_id: str, address: str) -> NodeInfo:
    return NodeInfo(
        role=role,
        incarnation=node_id,
        node_id=node_id,
        address=address,
        served_model_name="tiny",
        max_model_len=128,
        max_num_seqs=128,
        num_blocks=4096,
        layout=LAYOUT,
        endpoints=(),
        tokenizer_digest=tiny_tokenizer().digest,
        chat_template=CHAT_TEMPLATE,
        special_tokens=SPECIAL_TOKENS,
        generation_defaults=GenerationDefaults(eos_token_ids=(IM_END, EOT), temperature=0.7, top_p=0.9),
        vocab_size=vocab_size(),
    )
