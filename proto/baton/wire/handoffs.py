"""Messages of a handoff stream, between a prefill node and a decode node."""

from __future__ import annotations

from baton.block_hash import HASH_BYTES, BlockHash
from baton.errors import InvalidRequest
from baton.handoff_messages import (
    Commit,
    CommitReply,
    Credit,
    DecodeToPrefill,
    Grant,
    Heartbeat,
    Hello,
    Landed,
    PrefillToDecode,
    Refuse,
    Release,
    Reserve,
)
from baton.kv_groups import MAX_GROUPS
from baton.messages import Auth
from baton.v1 import node_pb2
from baton.wire import values
from baton.wire.limits import ANY, MAX_LEASES, MAX_MOVES, MAX_PARTS, MAX_SAMPLES, Limits
from baton.wire.sampling import read_sampling, write_sampling

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
        case Release(attempt_id):
            return node_pb2.PrefillMessage(release=node_pb2.Release(attempt_id=values.write_attempt_id(attempt_id)))
        case Hello():
            return node_pb2.PrefillMessage(hello=write_hello(message))
        case Auth():
            return node_pb2.PrefillMessage(auth=values.write_auth(message))


def read_prefill_message(wire: node_pb2.PrefillMessage, limits: Limits = ANY) -> FromPrefill:
    """Raises InvalidRequest for a message that is empty, of a newer kind, malformed, or beyond the reader's limits."""
    match wire.WhichOneof("kind"):
        case "heartbeat":
            return Heartbeat()
        case "reserve":
            return _read_reserve(wire.reserve, limits)
        case "commit":
            return _read_commit(wire.commit, limits)
        case "release":
            return Release(values.read_attempt_id(wire.release.attempt_id))
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
        case Refuse(attempt_id, error):
            refuse = node_pb2.Refuse(attempt_id=values.write_attempt_id(attempt_id), error=values.write_error(error))
            return node_pb2.DecodeMessage(refuse=refuse)
        case CommitReply(lease, attempt_id, outcome):
            reply = node_pb2.CommitReply(
                lease=lease, attempt_id=values.write_attempt_id(attempt_id), error=values.write_error(outcome)
            )
            return node_pb2.DecodeMessage(commit_reply=reply)
        case Landed(lease, attempt_id):
            landed = node_pb2.Landed(lease=lease, attempt_id=values.write_attempt_id(attempt_id))
            return node_pb2.DecodeMessage(landed=landed)
        case Hello():
            return node_pb2.DecodeMessage(hello=write_hello(message))
        case Auth():
            return node_pb2.DecodeMessage(auth=values.write_auth(message))


def read_decode_message(wire: node_pb2.DecodeMessage, limits: Limits = ANY) -> FromDecode:
    """Raises InvalidRequest for a message that is empty, of a newer kind, malformed, or beyond the reader's limits."""
    match wire.WhichOneof("kind"):
        case "heartbeat":
            return Heartbeat()
        case "grant":
            return _read_grant(wire.grant, limits)
        case "credit":
            lease, credits_ = _read_lease(wire.credit.lease), wire.credit.credits
            return Credit(lease, values.read_below(credits_, limits.max_parts + 1, "credits"))
        case "refuse":
            return Refuse(values.read_attempt_id(wire.refuse.attempt_id), values.read_error(wire.refuse.error))
        case "commit_reply":
            said = wire.commit_reply
            error = values.read_error(said.error) if said.HasField("error") else None
            return CommitReply(_read_lease(said.lease), values.read_attempt_id(said.attempt_id), error)
        case "landed":
            return Landed(_read_lease(wire.landed.lease), values.read_attempt_id(wire.landed.attempt_id))
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
        incarnation=values.read_name(wire.incarnation, "incarnation"),
        node_id=values.read_text(wire.node_id, "node_id"),
        layout=values.read_layout(wire.layout),
        endpoints=values.read_endpoints(wire.endpoints),
        target_incarnation=values.read_text(wire.target_incarnation, "target_incarnation"),
        part_blocks=wire.part_blocks,
        error=values.read_error(wire.error) if wire.HasField("error") else None,
        protocol_version=wire.protocol_version,
    )


def _write_reserve(message: Reserve) -> node_pb2.Reserve:
    return node_pb2.Reserve(
        attempt_id=values.write_attempt_id(message.attempt_id),
        target_incarnation=message.target_incarnation,
        num_tokens=message.num_tokens,
        block_hashes=values.write_hashes(message.block_hashes),
        num_samples=message.num_samples,
        deadline_s=values.write_time_left(message.deadline_s),
        max_total_tokens=message.max_total_tokens,
        grouped_from_block=message.grouped_from_block,
        layer_groups=message.layer_groups,
        priority=message.priority,
        move=message.move,
        num_spare_tokens=message.num_spare_tokens,
        age_s=message.age_s,
        goes_on=message.goes_on,
    )


def _read_reserve(wire: node_pb2.Reserve, limits: Limits) -> Reserve:
    if not wire.num_tokens or not wire.num_samples:
        raise InvalidRequest(f"a reserve of {wire.num_tokens} tokens for {wire.num_samples} samples", "num_tokens")
    if wire.num_tokens >= wire.max_total_tokens:
        text = f"{wire.num_tokens} tokens of {wire.max_total_tokens} leave none to generate"
        raise InvalidRequest(text, "max_total_tokens")
    if wire.num_spare_tokens >= wire.num_tokens:
        text = f"{wire.num_spare_tokens} spare tokens of {wire.num_tokens} leave none that are computed"
        raise InvalidRequest(text, "num_spare_tokens")
    groups = wire.layer_groups or 1
    if wire.num_tokens * groups > MAX_PARTS * max(1, limits.block_size):
        raise InvalidRequest(f"{wire.num_tokens} tokens by {groups} groups of layers", "layer_groups")
    return Reserve(
        attempt_id=values.read_attempt_id(wire.attempt_id),
        target_incarnation=values.read_text(wire.target_incarnation, "target_incarnation"),
        num_tokens=wire.num_tokens,
        block_hashes=_read_names(wire, limits),
        num_samples=values.read_below(wire.num_samples, MAX_SAMPLES + 1, "num_samples"),
        deadline_s=values.read_seconds(wire.deadline_s, "deadline_s", limits.max_seconds),
        max_total_tokens=wire.max_total_tokens,
        grouped_from_block=wire.grouped_from_block,
        layer_groups=groups,
        priority=wire.priority,
        move=values.read_below(wire.move, MAX_MOVES, "move"),
        num_spare_tokens=wire.num_spare_tokens,
        age_s=values.read_seconds(wire.age_s, "age_s"),
        goes_on=wire.goes_on,
    )


def _read_names(wire: node_pb2.Reserve, limits: Limits) -> tuple[BlockHash, ...]:
    """The block hashes, one for each full block of tokens that are computed."""
    size = HASH_BYTES * ((wire.num_tokens - wire.num_spare_tokens) // max(1, limits.block_size))
    if len(wire.block_hashes) > size or (limits.block_size and len(wire.block_hashes) < size):
        text = f"block_hashes: {len(wire.block_hashes)} bytes for {wire.num_tokens} tokens"
        raise InvalidRequest(text, "block_hashes")
    return values.read_hashes(wire.block_hashes)


def _write_commit(message: Commit) -> node_pb2.Commit:
    return node_pb2.Commit(
        lease=message.lease,
        attempt_id=values.write_attempt_id(message.attempt_id),
        target_incarnation=message.target_incarnation,
        prompt_tokens=values.pack_tokens(message.prompt_tokens, "prompt"),
        samples=values.write_samples(message.samples),
        sampling=write_sampling(message.sampling),
        deadline_s=values.write_time_left(message.deadline_s),
        cache_salt=message.cache_salt,
        age_s=message.age_s,
    )


def _read_commit(wire: node_pb2.Commit, limits: Limits) -> Commit:
    prompt = values.read_prompt(wire.prompt_tokens, limits)
    if not prompt:
        raise InvalidRequest("prompt: no tokens", "prompt")
    samples = values.read_samples(wire.samples, limits, most_shared=1)
    sampling = read_sampling(wire.sampling, limits)
    least = 0 if sampling.beam_width else 1  # a beam search starts with no token chosen
    if not least <= len(samples[0].output_tokens) < (1 if sampling.beam_width else sampling.max_tokens):
        text = f"samples: outputs of {len(samples[0].output_tokens)} tokens, of {sampling.max_tokens} at most"
        raise InvalidRequest(text, "samples")
    return Commit(
        lease=_read_lease(wire.lease),
        attempt_id=values.read_attempt_id(wire.attempt_id),
        target_incarnation=values.read_text(wire.target_incarnation, "target_incarnation"),
        prompt_tokens=prompt,
        samples=samples,
        sampling=sampling,
        deadline_s=values.read_seconds(wire.deadline_s, "deadline_s", limits.max_seconds),
        cache_salt=values.read_salt(wire.cache_salt),
        age_s=values.read_seconds(wire.age_s, "age_s"),
    )


def _write_grant(message: Grant) -> node_pb2.Grant:
    return node_pb2.Grant(
        attempt_id=values.write_attempt_id(message.attempt_id),
        lease=message.lease,
        num_held_blocks=message.num_held_blocks,
        num_parts=message.num_parts,
        credits=message.credits,
        checksums=message.checksums,
        num_held_in_groups=message.num_held_in_groups,
    )


def _read_grant(wire: node_pb2.Grant, limits: Limits) -> Grant:
    parts = values.read_below(wire.num_parts, limits.max_parts + 1, "num_parts")
    credits_ = values.read_below(wire.credits, parts + 1, "credits")
    held = values.read_below(wire.num_held_blocks, limits.max_model_len + 1, "num_held_blocks")
    if len(wire.num_held_in_groups) >= MAX_GROUPS:
        raise InvalidRequest(f"num_held_in_groups: {len(wire.num_held_in_groups)} groups", "num_held_in_groups")
    others = tuple(
        values.read_below(number, limits.max_model_len + 1, "num_held_in_groups") for number in wire.num_held_in_groups
    )
    attempt_id, lease = values.read_attempt_id(wire.attempt_id), _read_lease(wire.lease)
    return Grant(attempt_id, lease, held, parts, credits_, wire.checksums, others)


def _read_lease(serial: int) -> int:
    """Serials start at 1; 0 means none."""
    if not serial:
        raise InvalidRequest("lease: none is named", "lease")
    return values.read_below(serial, MAX_LEASES, "lease")
