"""What comes from outside, with any values: a router, a prefill node and a decode node that mean no good, beside a
router and two nodes that do.

The strategies give protobuf, since that is what others send; `HostileWorld.say` reads it as the nodes' edge does. Most
fields make sense, so that the state machines are reached; some do not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from google.protobuf.message import Message
from hypothesis import strategies as st

from baton import wire
from baton.errors import InvalidRequest
from baton.messages import Abort, Grant, NodeRole, Update, WorkId
from baton.v1 import common_pb2, node_pb2
from engine.node.events import (
    FromPeer,
    FromRouter,
    Output,
    PeerClosed,
    PeerOpened,
    SessionLost,
    SessionOpened,
    ToDecode,
    ToPrefill,
    ToRouter,
)
from engine.node.handoff_stream import DECODE_CODEC, PREFILL_CODEC
from kv_transfer.memory import MemoryTransport
from kv_transfer.parts import slot_bytes_for
from kv_transfer.sender import KvSender
from kv_transfer.staging import Staging
from tests.protocol.fake_model import VOCAB_SIZE
from tests.protocol.node import MAX_MODEL_LEN, PART_BLOCKS, Node
from tests.protocol.world import World

EVIL = 666
UNKNOWN = WorkId(EVIL, "unknown", 0)
EVIL_PREFILL, EVIL_DECODE = "evil-prefill", "evil-decode"
NUM_SLOTS = 4

# ---- values ----

uint32 = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 16, 63, 64, 65, 1023, 1024, 2**23, 2**31 - 1, 2**31, 2**32 - 1])
int32 = st.sampled_from([0, 1, 2, 96, 97, 2**31 - 1, -1, -(2**31)])
uint64 = st.sampled_from([0, 1, 2, 3, 2**39 - 1, 2**39, 2**62, 2**64 - 1])
number = st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e10, 1e300, float("nan"), float("inf"), float("-inf")])
text = st.sampled_from(["", "x", "x" * 257, "x" * 600, "a\nb"])
seconds = st.sampled_from([0.0, 0.02, 5.0, 1e6]) | number
in_vocabulary = st.integers(0, VOCAB_SIZE - 1)
some_tokens = st.lists(in_vocabulary, min_size=1, max_size=16).map(wire.pack_tokens)
any_tokens = st.sampled_from([b"", b"123", wire.pack_tokens([VOCAB_SIZE]), wire.pack_tokens([2**31, 1]), bytes(4 * 70)])
work = st.builds(
    common_pb2.WorkId,
    router_epoch=st.just(EVIL),
    request_id=st.sampled_from("abcde"),
    attempt=st.sampled_from([0, 0, 0, 1, 2]),
)


def mostly(make: Callable[..., Any], sense: dict[str, Any], nonsense: dict[str, Any]) -> st.SearchStrategy[Any]:
    """`make` with fields that make sense, but for up to two that need not."""
    spoilt = st.sets(st.sampled_from(sorted(nonsense)), max_size=2)
    changed = spoilt.flatmap(lambda names: st.fixed_dictionaries({name: nonsense[name] for name in sorted(names)}))
    return st.builds(lambda good, bad: make(**{**good, **bad}), st.fixed_dictionaries(sense), changed)


sampling = mostly(
    common_pb2.SamplingParams,
    {
        "temperature": st.just(1.0),
        "top_p": st.just(1.0),
        "repetition_penalty": st.just(1.0),
        "max_tokens": st.integers(2, 8),
        "num_logprobs": st.just(-1),
        "ignore_eos": st.booleans(),
    },
    {
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), number),
        **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "num_logprobs"), int32),
        "logit_bias": st.dictionaries(int32, number, max_size=2),
        "stop_token_ids": st.lists(int32, max_size=3) | st.just([3] * 2000),
        "seed": uint64,
    },
)


def samples(outputs: st.SearchStrategy[bytes]) -> st.SearchStrategy[Any]:
    one = st.builds(common_pb2.Sample, index=st.integers(0, 3), output_tokens=outputs)
    return st.lists(one, min_size=1, max_size=3, unique_by=lambda sample: sample.index)


any_samples = st.lists(st.builds(common_pb2.Sample, index=uint32, output_tokens=some_tokens | any_tokens), max_size=3)


def prefill(target: str, decodes: list[str]) -> st.SearchStrategy[node_pb2.RouterMessage]:
    decode = st.sampled_from(decodes).map(lambda peer: node_pb2.DecodeTarget(address=peer, incarnation=peer))
    sense = {
        "work": work,
        "target_incarnation": st.just(target),
        "prompt_tokens": some_tokens,
        "samples": samples(st.just(b"")),
        "sampling": sampling,
        "deadline_s": st.just(1e6),
        "decode": decode,
    }
    nonsense = {
        "target_incarnation": text,
        "prompt_tokens": any_tokens,
        "samples": any_samples,
        "deadline_s": seconds,
        "cache_salt": text,
        "decode": st.none() | st.builds(node_pb2.DecodeTarget, address=text, incarnation=text),
    }
    return mostly(node_pb2.Prefill, sense, nonsense).map(lambda said: node_pb2.RouterMessage(prefill=said))


abort = st.builds(node_pb2.Abort, work=work, samples=st.lists(st.integers(0, 3) | uint32, max_size=3)).map(
    lambda said: node_pb2.RouterMessage(abort=said)
)


def reserve(target: str) -> st.SearchStrategy[node_pb2.PrefillMessage]:
    num_tokens = st.integers(1, 16)
    sense = {
        "work": work,
        "target_incarnation": st.just(target),
        "num_samples": st.integers(1, 3),
        "deadline_s": st.just(1e6),
        "max_total_tokens": st.integers(18, 40),
        "layer_groups": st.integers(0, 2),
        "grouped_from_block": st.integers(0, 3),
    }
    nonsense = {
        **dict.fromkeys(
            ("num_tokens", "num_samples", "max_total_tokens", "layer_groups", "grouped_from_block"), uint32
        ),
        "target_incarnation": text,
        "block_hashes": st.sampled_from([b"", b"x" * 31, b"x" * 64, b"x" * 3200]),
        "deadline_s": seconds,
    }
    named = mostly(node_pb2.Reserve, sense, nonsense)
    return st.builds(_with_hashes, named, num_tokens, st.integers(0, 3))


def _with_hashes(said: node_pb2.Reserve, num_tokens: int, name: int) -> node_pb2.PrefillMessage:
    """As many as there are full blocks, unless it is spoilt already."""
    said.num_tokens = said.num_tokens or num_tokens
    if not said.block_hashes and said.num_tokens <= MAX_MODEL_LEN:
        said.block_hashes = b"".join(bytes([name, i]) * 16 for i in range(said.num_tokens // 4))
    return node_pb2.PrefillMessage(reserve=said)


def commit(granted: Grant | None, num_tokens: int) -> st.SearchStrategy[node_pb2.PrefillMessage]:
    """For a lease, if there is one."""
    prompt = st.lists(in_vocabulary, min_size=num_tokens, max_size=num_tokens).map(wire.pack_tokens)
    sense = {
        "lease": st.just(granted.lease if granted else 1),
        "work": st.just(wire.write_work(granted.work)) if granted else work,
        "prompt_tokens": prompt,
        "samples": samples(st.just(wire.pack_tokens([5]))),
        "sampling": sampling,
        "deadline_s": st.just(1e6),
    }
    nonsense = {
        "lease": uint64,
        "work": work,
        "prompt_tokens": any_tokens | some_tokens,
        "samples": any_samples,
        "deadline_s": seconds,
        "age_s": seconds,
        "cache_salt": text,
    }
    return mostly(node_pb2.Commit, sense, nonsense).map(lambda said: node_pb2.PrefillMessage(commit=said))


release = st.builds(node_pb2.Release, lease=uint64, work=work).map(lambda r: node_pb2.PrefillMessage(release=r))


def from_decode(works: list[Any], leases: list[int]) -> st.SearchStrategy[node_pb2.DecodeMessage]:
    """About work and leases that may be known; also about others'."""
    about, lease = st.sampled_from(works), st.sampled_from(leases) | uint64
    few = st.integers(0, 6)
    error = st.builds(common_pb2.Error, code=st.integers(0, 12), message=text)
    count = few | uint32
    grant = st.builds(
        node_pb2.Grant, work=about, lease=lease, num_held_blocks=few | uint32, num_parts=count, credits=count
    )
    return st.one_of(
        grant.map(lambda said: node_pb2.DecodeMessage(grant=said)),
        grant.map(lambda said: node_pb2.DecodeMessage(grant=said)),
        st.builds(node_pb2.Credit, lease=lease, credits=count).map(lambda said: node_pb2.DecodeMessage(credit=said)),
        st.builds(node_pb2.Refuse, work=about, error=error).map(lambda said: node_pb2.DecodeMessage(refuse=said)),
        st.builds(node_pb2.CommitReply, lease=lease, work=about, error=st.none() | error).map(
            lambda said: node_pb2.DecodeMessage(commit_reply=said)
        ),
    )


# ---- the world that they come to ----


class HostileWorld(World):
    """One prefill node and one decode node of ours, and three strangers that they take for their like. `grants`: what
    the decode node promised the evil prefill node; `num_tokens`: for what it had asked; `reserved`: what the prefill
    node asks of the evil decode node for."""

    def __init__(self) -> None:
        super().__init__(num_prefill=1, num_decode=1, num_slots=NUM_SLOTS)
        self.grants: dict[int, Grant] = {}
        self.num_tokens: dict[tuple[int, str], int] = {}
        self.reserved: list[Any] = []
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
            node.transport.connect(name, transport.info())
            transport.connect(node.incarnation, node.transport.info())
            node.hear(SessionOpened(EVIL))
            node.hear(PeerOpened(name, PART_BLOCKS))

    def say(self, node: Node, message: Message) -> None:
        """It reaches the node as it would over gRPC: read within the node's limits, and its work's end if it makes no
        sense."""
        limits = wire.Limits.of(node.info)
        parsed = type(message).FromString(message.SerializeToString())
        if isinstance(parsed, node_pb2.RouterMessage):
            try:
                said: Any = wire.read_router_message(parsed, limits)
            except InvalidRequest:
                said = Abort(wire.work_of(parsed)) if wire.work_of(parsed) else None
            event: Any = FromRouter(EVIL, said)
        else:
            peer, codec = (EVIL_PREFILL, DECODE_CODEC) if node is self.decode else (EVIL_DECODE, PREFILL_CODEC)
            try:
                said = codec.read(parsed, limits)
            except InvalidRequest as error:
                about = wire.work_of(parsed)
                said = codec.fail(about, error)[1] if about else None
            event = FromPeer(peer, said)
        if said is not None:
            node.hear(event)
        self.settle()

    def send_parts(self, lease: int) -> None:
        """All that the evil prefill node may send of a lease: sevens."""
        for part in range(self.grants[lease].credits):
            self.sender.send(self.decode.incarnation, lease, part, [1, 2][:PART_BLOCKS], checked=True)
        self.sender.poll()
        self.settle()

    def go_away(self) -> None:
        """The strangers leave."""
        for node, name in ((self.decode, EVIL_PREFILL), (self.prefill, EVIL_DECODE)):
            node.transport.disconnect(name)
            node.hear(PeerClosed(name, "left"))
            node.hear(SessionLost(EVIL))
        self.settle()

    def _carry(self, incarnation: str, output: Output, updates: list[Update]) -> None:
        match output:
            case ToRouter(epoch, _) if epoch == EVIL:
                pass
            case ToPrefill(peer, message) if peer == EVIL_PREFILL:
                if isinstance(message, Grant):
                    self.grants[message.lease] = message
            case ToDecode(target, message) if target.incarnation not in self.nodes:
                self.reserved.append(message.work)
                if target.incarnation != EVIL_DECODE:  # nobody is there
                    self.nodes[incarnation].hear(PeerClosed(target.incarnation, "connection refused"))
            case _:
                super()._carry(incarnation, output, updates)
