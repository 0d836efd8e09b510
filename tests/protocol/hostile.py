"""What comes from outside, with any values: a router, a prefill node and a decode node that mean no good, beside a
router and two nodes that do.

The strategies give protobuf, since that is what others send; `HostileWorld.say` reads it as the nodes' edge does. Most
fields make sense, so that the state machines are reached; some do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from baton import wire
from baton.errors import InvalidRequest
from baton.handoff_messages import Grant
from baton.messages import Abort, AttemptId, Update
from baton.node_info import NodeRole
from baton.v1 import common_pb2, node_pb2
from kv_transfer.parts import slot_bytes_for
from kv_transfer.ranks import rank_name
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from kv_transfer.transports.memory import MemoryTransport
from node.events import (
    Event,
    FromPeer,
    Output,
    PeerClosed,
    PeerOpened,
    SessionLost,
    SessionOpened,
    TargetEvent,
    ToDecode,
    ToPrefill,
)
from node.handoffs.stream import DECODE_CODEC, PREFILL_CODEC
from tests.protocol.fake_grammars import structured
from tests.protocol.fake_model import VOCAB_SIZE
from tests.protocol.node import BLOCK_SIZE, MAX_MODEL_LEN, PART_BLOCKS, Node, outward
from tests.protocol.world import World

EVIL = 666
UNKNOWN = AttemptId(EVIL, "unknown", 0)
EVIL_PREFILL, EVIL_DECODE = "evil-prefill", "evil-decode"
NUM_SLOTS = 4

# ---- values ----

uint32 = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 16, 63, 64, 65, 1023, 1024, 2**23, 2**31 - 1, 2**31, 2**32 - 1])
int32 = st.sampled_from([0, 1, 2, 96, 97, 2**31 - 1, -1, -(2**31)])
uint64 = st.sampled_from([0, 1, 2, 3, 2**39 - 1, 2**39, 2**62, 2**64 - 1])
number = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e10, 1e300, float("nan"), float("inf"), float("-inf")])
text = st.sampled_from([0, 1, 257, 600]).map(lambda length: "x" * length) | st.just("a\nb")
seconds = st.sampled_from([0.0, 0.02, 5.0, 1e6]) | number
in_vocabulary = st.integers(0, VOCAB_SIZE - 1)
some_tokens = st.lists(in_vocabulary, min_size=1, max_size=16).map(wire.pack_tokens)
any_tokens = st.sampled_from([(), (VOCAB_SIZE,), (2**31, 1), (0,) * 70]).map(wire.pack_tokens) | st.just(b"123")
attempt_id = st.builds(
    common_pb2.AttemptId,
    router_epoch=st.just(EVIL),
    request_id=st.sampled_from("abcde"),
    attempt=st.sampled_from([0, 0, 0, 1, 2]),
)


def mostly(make: Callable[..., Any], sense: dict[str, Any], nonsense: dict[str, Any]) -> st.SearchStrategy[Any]:
    """`make` with fields that make sense; in every second case but for one or two, which need not."""
    other = st.one_of([st.tuples(st.just(name), values) for name, values in nonsense.items()])
    spoilt: st.SearchStrategy[list[Any]] = st.just([]) | st.lists(other, min_size=1, max_size=2)
    return st.builds(lambda good, bad: make(**{**good, **dict(bad)}), st.fixed_dictionaries(sense), spoilt)


_PLAIN = {
    "temperature": st.just(1.0),
    "top_p": st.just(1.0),
    "repetition_penalty": st.just(1.0),
    "max_tokens": st.integers(2, 8),
    "num_logprobs": st.just(-1),
    "ignore_eos": st.booleans(),
}
_NONSENSE = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), number),
    **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "num_logprobs", "beam_width"), int32),
    "logit_bias": st.dictionaries(int32, number, max_size=2),
    "stop_token_ids": st.lists(int32, max_size=3) | st.just(2000).map(lambda length: [3] * length),
    "allowed_token_ids": st.lists(int32, max_size=3),
    "bad_words_token_ids": st.lists(st.binary(max_size=8), max_size=3),
    "seed": uint64,
    "structured_outputs": st.builds(common_pb2.StructuredOutput, kind=st.sampled_from(["json", "frob"])),
}
_MATCHED = st.sampled_from([structured((), None), structured((), None, compiles=False)]).map(
    lambda constraint: common_pb2.StructuredOutput(kind=constraint.kind.value, text=constraint.text)
)
sampling = (
    mostly(common_pb2.SamplingParams, _PLAIN, _NONSENSE)
    | mostly(common_pb2.SamplingParams, {**_PLAIN, "structured_outputs": _MATCHED}, _NONSENSE)
    | mostly(common_pb2.SamplingParams, {**_PLAIN, "temperature": st.just(0.0), "beam_width": st.just(2)}, _NONSENSE)
)


def _samples(outputs: st.SearchStrategy[bytes]) -> st.SearchStrategy[Any]:
    one = st.builds(common_pb2.Sample, index=st.integers(0, 3), output_tokens=outputs)
    return st.lists(one, min_size=1, max_size=3, unique_by=lambda sample: sample.index)


any_samples = st.lists(st.builds(common_pb2.Sample, index=uint32, output_tokens=some_tokens | any_tokens), max_size=3)
HERE, THERE = "here", "there"  # the node that is spoken to, and our decode node: `HostileWorld.say` has their names

prefill = mostly(
    node_pb2.Prefill,
    {
        "attempt_id": attempt_id,
        "target_incarnation": st.just(HERE),
        "prompt_tokens": some_tokens,
        "samples": _samples(st.just(b"")),
        "sampling": sampling,
        "deadline_s": st.just(1e6),
        "decode": st.sampled_from([THERE, EVIL_DECODE]).map(
            lambda peer: node_pb2.DecodeTarget(address=peer, incarnation=peer)
        ),
    },
    {
        "target_incarnation": text,
        "prompt_tokens": any_tokens,
        "samples": any_samples,
        "deadline_s": seconds,
        "cache_salt": text,
        "decode": st.none() | st.builds(node_pb2.DecodeTarget, address=text, incarnation=text),
    },
).map(lambda said: node_pb2.RouterMessage(prefill=said))

abort = st.builds(node_pb2.Abort, attempt_id=attempt_id, samples=st.lists(st.integers(0, 3) | uint32, max_size=3)).map(
    lambda said: node_pb2.RouterMessage(abort=said)
)
migrate = mostly(
    node_pb2.Migrate,
    {
        "attempt_id": attempt_id,
        "move": st.integers(1, 4),
        "target": st.just(node_pb2.DecodeTarget(address=EVIL_DECODE, incarnation=EVIL_DECODE)),
    },
    {"move": uint32, "target": st.builds(node_pb2.DecodeTarget, address=text, incarnation=text)},
).map(lambda said: node_pb2.RouterMessage(migrate=said))
from_router = st.one_of(prefill, prefill, abort, migrate)


def _name_blocks(said: node_pb2.Reserve) -> node_pb2.PrefillMessage:
    """As many as are full, unless that is spoilt already."""
    if not said.block_hashes and said.num_tokens <= MAX_MODEL_LEN:
        num_named = max(0, said.num_tokens - said.num_spare_tokens) // BLOCK_SIZE
        said.block_hashes = b"".join(bytes([i]) * 32 for i in range(num_named))
    return node_pb2.PrefillMessage(reserve=said)


reserve = mostly(
    node_pb2.Reserve,
    {
        "attempt_id": attempt_id,
        "target_incarnation": st.just(HERE),
        "num_tokens": st.integers(1, 16),
        "num_samples": st.integers(1, 3),
        "deadline_s": st.just(1e6),
        "max_total_tokens": st.integers(18, 40),
        "layer_groups": st.integers(0, 2),
        "grouped_from_block": st.integers(0, 3),
    },
    {
        **dict.fromkeys(("num_tokens", "num_samples", "max_total_tokens"), uint32),
        **dict.fromkeys(("layer_groups", "grouped_from_block", "move", "num_spare_tokens"), uint32),
        "target_incarnation": text,
        "block_hashes": st.sampled_from([31, 64, 3200]).map(bytes),
        "deadline_s": seconds,
    },
).map(_name_blocks)

commit = mostly(
    node_pb2.Commit,
    {
        "target_incarnation": st.just(HERE),
        "samples": _samples(st.just(wire.pack_tokens([5]))),
        "sampling": sampling,
        "deadline_s": st.just(1e6),
    },
    {
        "lease": uint64,
        "attempt_id": attempt_id,
        "prompt_tokens": any_tokens | some_tokens,
        "samples": any_samples,
        "deadline_s": seconds,
        "age_s": seconds,
        "cache_salt": text,
    },
).map(lambda said: node_pb2.PrefillMessage(commit=said))

release = st.builds(node_pb2.Release, attempt_id=attempt_id).map(lambda said: node_pb2.PrefillMessage(release=said))
from_prefill = st.one_of(reserve, reserve, commit, commit, release)

_few = st.integers(0, 6) | st.integers(0, 6) | uint32
_lease = st.integers(1, 9) | uint64
_error = st.none() | st.builds(common_pb2.Error, code=st.integers(0, 12), message=text)
grant = mostly(
    node_pb2.Grant,
    {"lease": st.integers(1, 9), "num_parts": st.just(2), "credits": st.integers(0, 2)},  # as 5 to 8 tokens have
    {
        "lease": uint64,
        "num_held_blocks": _few,
        "num_parts": _few,
        "credits": _few,
        "num_held_in_groups": st.lists(_few, max_size=9),
    },
)
from_decode = st.one_of(
    grant.map(lambda said: node_pb2.DecodeMessage(grant=said)),
    grant.map(lambda said: node_pb2.DecodeMessage(grant=said)),
    st.builds(lambda n, c: node_pb2.DecodeMessage(credit=node_pb2.Credit(lease=n, credits=c)), _lease, _few),
    st.builds(lambda error: node_pb2.DecodeMessage(refuse=node_pb2.Refuse(error=error)), _error),
    st.builds(lambda n: node_pb2.DecodeMessage(landed=node_pb2.Landed(lease=n)), _lease),
    st.builds(lambda n, e: node_pb2.DecodeMessage(commit_reply=node_pb2.CommitReply(lease=n, error=e)), _lease, _error),
)


# ---- the world that they come to ----


class HostileWorld(World):
    """One prefill node and one decode node of ours, and three strangers that they take for their like. `grants`: what
    the decode node promised the evil prefill node; `num_tokens`: for how many it had asked; `reserved`: what the
    evil decode node is asked for."""

    def __init__(self, windows: tuple[int | None, ...] = (None, None)) -> None:
        super().__init__(num_prefill=1, num_decode=1, num_slots=NUM_SLOTS, windows=windows, has_grammars=True)
        self.grants: dict[int, Grant] = {}
        self.num_tokens: dict[tuple[str, int], int] = {}
        self.reserved: list[Any] = []
        self._refused: list[tuple[Node, Event]] = []
        self.prefill, self.decode = (next(n for n in self.nodes.values() if n.role is role) for role in NodeRole)
        self.run_dry()  # until the router knows them
        layout = self.decode.model.layout
        slot_bytes = slot_bytes_for(PART_BLOCKS, layout.block_bytes)
        stagings = [Staging(64, slot_bytes, "cpu") for _ in range(2)]
        transports = [
            MemoryTransport(self.hub, name, staging, lambda: None)
            for name, staging in zip((EVIL_PREFILL, EVIL_DECODE), stagings, strict=True)
        ]
        pool = torch.full((4, layout.block_bytes), 7, dtype=torch.uint8)
        self.sender = KvSender(transports[0], stagings[0], pool, layout)
        for node, name, transport in (
            (self.decode, EVIL_PREFILL, transports[0]),
            (self.prefill, EVIL_DECODE, transports[1]),
        ):
            node.model.lied_to = frozenset({EVIL})
            node.connect(name, [transport.info()])
            transport.connect(node.incarnation, node.transport.info())
            node.hear(SessionOpened(EVIL))
            node.hear(PeerOpened(name, PART_BLOCKS, layout))
        self.decode.connect(EVIL_DECODE, [transports[1].info()], is_target=True)
        transports[1].connect(rank_name(outward(self.decode.incarnation), 0), self.decode.out_transports[0].info())
        self.decode.hear(TargetEvent(PeerOpened(EVIL_DECODE, PART_BLOCKS, layout)))

    def check_credits(self) -> None:
        """A stranger may take more than it was given."""

    def get_in(self) -> None:
        """The strangers have a foothold: prompts on their way to the evil decode node, one that runs on ours and is to
        move there, and a lease on ours."""
        params = common_pb2.SamplingParams(temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=8)
        target = node_pb2.DecodeTarget(address=EVIL_DECODE, incarnation=EVIL_DECODE)
        prompt = wire.pack_tokens(range(2, 9))
        for name in ("a", "b"):
            about = common_pb2.AttemptId(router_epoch=EVIL, request_id=name)
            asked = node_pb2.Prefill(
                attempt_id=about,
                target_incarnation=HERE,
                prompt_tokens=prompt,
                samples=[common_pb2.Sample()],
                sampling=params,
                deadline_s=1e6,
                decode=target,
            )
            self.say(self.prefill, node_pb2.RouterMessage(prefill=asked), 0)
        about = common_pb2.AttemptId(router_epoch=EVIL, request_id="d")
        asked = node_pb2.Prefill(
            attempt_id=about,
            target_incarnation=HERE,
            prompt_tokens=prompt,
            samples=[common_pb2.Sample()],
            sampling=common_pb2.SamplingParams(
                temperature=1.0, top_p=1.0, repetition_penalty=1.0, max_tokens=40, ignore_eos=True
            ),
            deadline_s=1e6,
        )
        self.say(self.decode, node_pb2.RouterMessage(prefill=asked), 0)
        for _ in range(4):
            self.act(("turn", self.decode.incarnation))
            while self.decode.model.is_busy:
                self.decode.advance_device()
        moves = node_pb2.Migrate(attempt_id=about, move=1, target=target)
        self.say(self.decode, node_pb2.RouterMessage(migrate=moves), 0)
        about = common_pb2.AttemptId(router_epoch=EVIL, request_id="c")
        room = node_pb2.Reserve(attempt_id=about, target_incarnation=HERE, num_tokens=7, num_samples=2, deadline_s=1e6)
        room.max_total_tokens = 20
        self.say(self.decode, _name_blocks(room), 0)
        for node in (self.prefill, self.decode):
            self.act(("turn", node.incarnation))

    def say(self, node: Node, message: Any, pick: int) -> None:
        """It reaches the node as it would over gRPC: read within the node's limits, and its work's end if it makes no
        sense. What it has not said yet (which work, which lease) is one of those that there are, by `pick`."""
        self._aim(node, message, pick)
        parsed, limits = type(message).FromString(message.SerializeToString()), wire.Limits.of(node.info)
        about = wire.attempt_of(parsed)
        if isinstance(parsed, node_pb2.RouterMessage):
            try:
                read: Any = wire.read_router_message(parsed, limits)
                node.hear(read)
            except InvalidRequest:
                if about:
                    node.hear(Abort(about))
        else:
            from_evil_prefill = isinstance(parsed, node_pb2.PrefillMessage)
            peer, codec = (EVIL_PREFILL, DECODE_CODEC) if from_evil_prefill else (EVIL_DECODE, PREFILL_CODEC)
            event = None
            try:
                event = FromPeer(peer, codec.read(parsed, limits))
            except InvalidRequest as error:
                if about:
                    event = FromPeer(peer, codec.fail(about, error)[1])
            if event is not None:
                node.hear(event if from_evil_prefill or node is self.prefill else TargetEvent(event))
        self.settle()

    def _aim(self, node: Node, message: Any, pick: int) -> None:
        said = getattr(message, message.WhichOneof("kind"))
        if getattr(said, "target_incarnation", "") == HERE:
            said.target_incarnation = node.incarnation
        match said:
            case node_pb2.Prefill() if said.decode.incarnation == THERE:
                said.decode.incarnation = said.decode.address = self.decode.incarnation
            case node_pb2.Reserve():
                self.num_tokens[said.attempt_id.request_id, said.attempt_id.attempt] = said.num_tokens
            case node_pb2.Commit() if self.grants:
                granted = list(self.grants.values())[pick % len(self.grants)]
                num_tokens = self.num_tokens.get((granted.attempt_id.request_id, granted.attempt_id.attempt), 1)
                said.lease = said.lease or granted.lease
                said.prompt_tokens = said.prompt_tokens or wire.pack_tokens([pick % VOCAB_SIZE] * min(num_tokens, 99))
                if not said.HasField("attempt_id"):
                    said.attempt_id.CopyFrom(wire.write_attempt_id(granted.attempt_id))
            case node_pb2.Grant() | node_pb2.Refuse() | node_pb2.CommitReply() | node_pb2.Landed():
                others = [attempt_id for client in self.clients.values() for attempt_id in client.state.attempts]
                attempts = [*self.reserved[-3:], *others, UNKNOWN]
                said.attempt_id.CopyFrom(wire.write_attempt_id(attempts[pick % len(attempts)]))

    def send_parts(self, lease: int) -> None:
        """All that the evil prefill node may send of a lease: sevens."""
        for part in range(self.grants[lease].credits):
            self.sender.send(self.decode.incarnation, lease, part, [1, 2][:PART_BLOCKS], checked=True)
        self.sender.poll()
        self.settle()

    def go_away(self) -> None:
        """The strangers leave."""
        self.decode.out_movers.disconnect(EVIL_DECODE)
        self.decode.hear(TargetEvent(PeerClosed(EVIL_DECODE, "left")))
        for node, name in ((self.decode, EVIL_PREFILL), (self.prefill, EVIL_DECODE)):
            node.movers.disconnect(name)
            node.hear(PeerClosed(name, "left"))
            node.hear(SessionLost(EVIL))
        self.settle()

    def settle(self) -> None:
        super().settle()
        while self._refused:
            self._hear_refusals()
            super().settle()

    def _turn(self, incarnation: str) -> None:
        super()._turn(incarnation)
        self._hear_refusals()

    def _hear_refusals(self) -> None:
        """Between turns, as a node hears everything."""
        refused, self._refused = self._refused, []
        for node, event in refused:
            node.hear(event)

    def _carry(self, incarnation: str, output: Output, updates: list[Update]) -> None:
        match output:
            case Update(attempt_id, _) if attempt_id.router_epoch == EVIL:
                pass
            case ToPrefill(peer, message) if peer == EVIL_PREFILL:
                if isinstance(message, Grant):
                    self.grants[message.lease] = message
            case ToDecode(target, message) if target.incarnation not in self.nodes:
                self.reserved.append(message.attempt_id)
                if target.incarnation != EVIL_DECODE:  # nobody is there
                    closed = PeerClosed(target.incarnation, "connection refused")
                    node = self.nodes[incarnation]
                    self._refused.append((node, TargetEvent(closed) if node is self.decode else closed))
            case _:
                super()._carry(incarnation, output, updates)
