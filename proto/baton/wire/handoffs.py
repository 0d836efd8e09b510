"""Messages of a handoff stream: one prefill node and one decode node."""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.messages import (
    Auth,
    Commit,
    CommitReply,
    Credit,
    DecodeToPrefill,
    Grant,
    Heartbeat,
    Hello,
    PrefillToDecode,
    Refuse,
    Release,
    Reserve,
)
from baton.v1 import node_pb2
from baton.wire import values

FromPrefill = Auth | Hello | Heartbeat | PrefillToDecode
FromDecode = Auth | Hello | Heartbeat | DecodeToPrefill


def write_prefill_message(message: FromPrefill) -> node_pb2.PrefillMessage:
    match message:
        case Heartbeat():
            return node_pb2.PrefillMessage(heartbeat=node_pb2.Heartbeat())
        case Reserve():
            return node_pb2.PrefillMessage(reserve=_write_reserve(message))
        case Commit():
            return node_pb2.PrefillMessage(commit=_write_commit(message))
        case Release(lease, work):
            return node_pb2.PrefillMessage(release=node_pb2.Release(lease=lease, work=values.write_work(work)))
        case Hello():
            return node_pb2.PrefillMessage(hello=write_hello(message))
        case Auth():
            return node_pb2.PrefillMessage(auth=values.write_auth(message))


def read_prefill_message(wire: node_pb2.PrefillMessage) -> FromPrefill:
    """Raises InvalidRequest for a message that is empty, of a newer kind, or malformed."""
    match wire.WhichOneof("kind"):
        case "heartbeat":
            return Heartbeat()
        case "reserve":
            return _read_reserve(wire.reserve)
        case "commit":
            return _read_commit(wire.commit)
        case "release":
            return Release(wire.release.lease, values.read_work(wire.release.work))
        case "hello":
            return read_hello(wire.hello)
        case "auth":
            return values.read_auth(wire.auth)
        case _:
            raise InvalidRequest("a prefill node's message of no known kind")


def write_decode_message(message: FromDecode) -> node_pb2.DecodeMessage:
    match message:
        case Heartbeat():
            return node_pb2.DecodeMessage(heartbeat=node_pb2.Heartbeat())
        case Grant():
            return node_pb2.DecodeMessage(grant=_write_grant(message))
        case Credit(lease, credits_):
            return node_pb2.DecodeMessage(credit=node_pb2.Credit(lease=lease, credits=credits_))
        case Refuse(work, error):
            refuse = node_pb2.Refuse(work=values.write_work(work), error=values.write_error(error))
            return node_pb2.DecodeMessage(refuse=refuse)
        case CommitReply(lease, work, outcome):
            reply = node_pb2.CommitReply(lease=lease, work=values.write_work(work), error=values.write_error(outcome))
            return node_pb2.DecodeMessage(commit_reply=reply)
        case Hello():
            return node_pb2.DecodeMessage(hello=write_hello(message))
        case Auth():
            return node_pb2.DecodeMessage(auth=values.write_auth(message))


def read_decode_message(wire: node_pb2.DecodeMessage) -> FromDecode:
    """Raises InvalidRequest for a message that is empty, of a newer kind, or malformed."""
    match wire.WhichOneof("kind"):
        case "heartbeat":
            return Heartbeat()
        case "grant":
            return _read_grant(wire.grant)
        case "credit":
            return Credit(wire.credit.lease, wire.credit.credits)
        case "refuse":
            return Refuse(values.read_work(wire.refuse.work), values.read_error(wire.refuse.error))
        case "commit_reply":
            said = wire.commit_reply
            error = values.read_error(said.error) if said.HasField("error") else None
            return CommitReply(said.lease, values.read_work(said.work), error)
        case "hello":
            return read_hello(wire.hello)
        case "auth":
            return values.read_auth(wire.auth)
        case _:
            raise InvalidRequest("a decode node's message of no known kind")


def write_hello(hello: Hello) -> node_pb2.Hello:
    return node_pb2.Hello(
        protocol_version=hello.protocol_version,
        incarnation=hello.incarnation,
        target_incarnation=hello.target_incarnation,
        node_id=hello.node_id,
        layout=values.write_layout(hello.layout),
        endpoints=values.write_endpoints(hello.endpoints),
        error=values.write_error(hello.error),
        part_blocks=hello.part_blocks,
    )


def read_hello(wire: node_pb2.Hello) -> Hello:
    if not wire.incarnation:
        raise InvalidRequest("hello names no incarnation", "incarnation")
    return Hello(
        incarnation=wire.incarnation,
        node_id=wire.node_id,
        layout=values.read_layout(wire.layout),
        endpoints=values.read_endpoints(wire.endpoints),
        target_incarnation=wire.target_incarnation,
        part_blocks=wire.part_blocks,
        error=values.read_error(wire.error) if wire.HasField("error") else None,
        protocol_version=wire.protocol_version,
    )


def _write_reserve(message: Reserve) -> node_pb2.Reserve:
    return node_pb2.Reserve(
        work=values.write_work(message.work),
        target_incarnation=message.target_incarnation,
        num_tokens=message.num_tokens,
        block_hashes=values.write_hashes(message.block_hashes),
        num_samples=message.num_samples,
        deadline_s=message.deadline_s,
        max_total_tokens=message.max_total_tokens,
        grouped_from_block=message.grouped_from_block,
        layer_groups=message.layer_groups,
    )


def _read_reserve(wire: node_pb2.Reserve) -> Reserve:
    if not wire.num_tokens or not wire.num_samples:
        raise InvalidRequest(f"a reserve of {wire.num_tokens} tokens for {wire.num_samples} samples", "num_tokens")
    return Reserve(
        work=values.read_work(wire.work),
        target_incarnation=wire.target_incarnation,
        num_tokens=wire.num_tokens,
        block_hashes=values.read_hashes(wire.block_hashes),
        num_samples=wire.num_samples,
        deadline_s=values.read_seconds(wire.deadline_s, "deadline_s"),
        max_total_tokens=wire.max_total_tokens,
        grouped_from_block=wire.grouped_from_block,
        layer_groups=wire.layer_groups or 1,
    )


def _write_commit(message: Commit) -> node_pb2.Commit:
    return node_pb2.Commit(
        lease=message.lease,
        work=values.write_work(message.work),
        target_incarnation=message.target_incarnation,
        prompt_tokens=values.pack_tokens(message.prompt_tokens, "prompt"),
        samples=values.write_samples(message.samples),
        sampling=values.write_sampling(message.sampling),
        deadline_s=message.deadline_s,
        cache_salt=message.cache_salt,
        age_s=message.age_s,
    )


def _read_commit(wire: node_pb2.Commit) -> Commit:
    return Commit(
        lease=wire.lease,
        work=values.read_work(wire.work),
        target_incarnation=wire.target_incarnation,
        prompt_tokens=values.unpack_tokens(wire.prompt_tokens, "prompt"),
        samples=values.read_samples(wire.samples),
        sampling=values.read_sampling(wire.sampling),
        deadline_s=values.read_seconds(wire.deadline_s, "deadline_s"),
        cache_salt=wire.cache_salt,
        age_s=values.read_seconds(wire.age_s, "age_s"),
    )


def _write_grant(message: Grant) -> node_pb2.Grant:
    return node_pb2.Grant(
        work=values.write_work(message.work),
        lease=message.lease,
        num_held_blocks=message.num_held_blocks,
        num_parts=message.num_parts,
        credits=message.credits,
        checksums=message.checksums,
    )


def _read_grant(wire: node_pb2.Grant) -> Grant:
    work = values.read_work(wire.work)
    return Grant(work, wire.lease, wire.num_held_blocks, wire.num_parts, wire.credits, wire.checksums)
