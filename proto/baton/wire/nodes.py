"""Messages in which a node describes itself, for routers and operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields

from baton.audit import KvAudit, KvBlock, KvHolder, KvSlot
from baton.errors import InvalidRequest
from baton.node_info import MAX_MODEL_ALIASES, GenerationDefaults, NodeInfo, NodeRole
from baton.sampling import DEFAULT_MAX_LOGPROBS
from baton.structured_output.constraint import StructuredBackend
from baton.v1 import common_pb2, node_pb2
from baton.wire import values
from baton.wire.limits import MAX_NAME_CHARS, MAX_SPECIAL_TOKENS, MAX_TEMPLATE_CHARS, MAX_TOKEN_IDS

_ROLE_TO_WIRE = {
    NodeRole.PREFILL: common_pb2.NODE_ROLE_PREFILL,
    NodeRole.DECODE: common_pb2.NODE_ROLE_DECODE,
}
_ROLE_FROM_WIRE = {int(wire): role for role, wire in _ROLE_TO_WIRE.items()}
_OPTIONAL_DEFAULTS = tuple(stated.name for stated in fields(GenerationDefaults) if stated.default is None)


def write_node_info(info: NodeInfo) -> common_pb2.NodeInfo:
    return common_pb2.NodeInfo(
        protocol_version=info.protocol_version,
        role=_ROLE_TO_WIRE[info.role],
        incarnation=info.incarnation,
        node_id=info.node_id,
        address=info.address,
        served_model_name=info.served_model_name,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        num_blocks=info.num_blocks,
        layout=values.write_layout(info.layout),
        endpoints=values.write_endpoints(info.endpoints),
        tokenizer_digest=info.tokenizer_digest,
        chat_template=info.chat_template,
        special_tokens=info.special_tokens,
        generation_defaults=write_generation_defaults(info.generation_defaults),
        vocab_size=info.vocab_size,
        version=info.version,
        structured_outputs_backend=info.structured_outputs_backend.value,
        metrics_address=info.metrics_address,
        model_aliases=info.model_aliases,
        max_logprobs=info.max_logprobs,
    )


def read_node_info(wire: common_pb2.NodeInfo) -> NodeInfo:
    """Raises InvalidRequest for a role of a newer version, and for values that are invalid for any node."""
    role = _ROLE_FROM_WIRE.get(wire.role)
    if role is None:
        raise InvalidRequest(f"node role {wire.role} is not known here", "role")
    for name in ("max_model_len", "max_num_seqs", "num_blocks", "vocab_size"):
        if not 0 < getattr(wire, name) <= MAX_TOKEN_IDS:
            raise InvalidRequest(f"{name} must be in [1, {MAX_TOKEN_IDS}], not {getattr(wire, name)}", name)
    return NodeInfo(
        role=role,
        incarnation=values.read_name(wire.incarnation, "incarnation"),
        node_id=values.read_name(wire.node_id, "node_id"),
        address=values.read_name(wire.address, "address"),
        served_model_name=values.read_name(wire.served_model_name, "served_model_name"),
        max_model_len=wire.max_model_len,
        max_num_seqs=wire.max_num_seqs,
        num_blocks=wire.num_blocks,
        layout=values.read_layout(wire.layout),
        endpoints=values.read_endpoints(wire.endpoints),
        tokenizer_digest=values.read_text(wire.tokenizer_digest, "tokenizer_digest"),
        chat_template=_read_template(wire.chat_template),
        special_tokens=_read_special_tokens(wire.special_tokens),
        generation_defaults=read_generation_defaults(wire.generation_defaults),
        vocab_size=wire.vocab_size,
        protocol_version=wire.protocol_version,
        version=values.read_text(wire.version, "version"),
        structured_outputs_backend=_read_backend(wire.structured_outputs_backend),
        metrics_address=wire.metrics_address,
        model_aliases=_read_aliases(wire.model_aliases),
        max_logprobs=_read_max_logprobs(wire),
    )


def _read_backend(name: str) -> StructuredBackend:
    try:
        return StructuredBackend(name) if name else StructuredBackend.GUIDANCE
    except ValueError:
        shown = repr(name[:MAX_NAME_CHARS])
        raise InvalidRequest(
            f"structured outputs backend {shown} is not known here", "structured_outputs_backend"
        ) from None


def _read_aliases(names: Sequence[str]) -> tuple[str, ...]:
    if len(names) > MAX_MODEL_ALIASES:
        raise InvalidRequest(f"model_aliases: {len(names)} names", "model_aliases")
    return tuple(values.read_name(name, "model_aliases") for name in names)


def _read_max_logprobs(wire: common_pb2.NodeInfo) -> int:
    """Nodes of older versions say nothing."""
    if not wire.HasField("max_logprobs"):
        return DEFAULT_MAX_LOGPROBS
    if wire.max_logprobs > MAX_TOKEN_IDS:
        raise InvalidRequest(f"max_logprobs must be in [0, {MAX_TOKEN_IDS}], not {wire.max_logprobs}", "max_logprobs")
    return wire.max_logprobs


def _read_template(text: str) -> str:
    if len(text) > MAX_TEMPLATE_CHARS:
        raise InvalidRequest(f"chat_template: {len(text)} characters", "chat_template")
    return text


def _read_special_tokens(wire: Mapping[str, str]) -> dict[str, str]:
    if len(wire) > MAX_SPECIAL_TOKENS or any(len(s) > MAX_NAME_CHARS for entry in wire.items() for s in entry):
        raise InvalidRequest("special_tokens: too many, or too long", "special_tokens")
    return dict(wire)


def write_generation_defaults(defaults: GenerationDefaults) -> common_pb2.GenerationDefaults:
    given = {name: getattr(defaults, name) for name in _OPTIONAL_DEFAULTS}  # None leaves a field unset
    return common_pb2.GenerationDefaults(eos_token_ids=defaults.eos_token_ids, **given)


def read_generation_defaults(wire: common_pb2.GenerationDefaults) -> GenerationDefaults:
    given = {name: getattr(wire, name) for name in _OPTIONAL_DEFAULTS if wire.HasField(name)}
    for name, value in given.items():
        if not math.isfinite(value):
            raise InvalidRequest(f"{name} of the generation defaults is {value}", name)
    if len(wire.eos_token_ids) > MAX_SPECIAL_TOKENS:
        raise InvalidRequest(f"eos_token_ids: {len(wire.eos_token_ids)} of them", "eos_token_ids")
    return GenerationDefaults(eos_token_ids=tuple(wire.eos_token_ids), **given)


def write_kv_audit(audit: KvAudit) -> node_pb2.KvAudit:
    return node_pb2.KvAudit(
        node_id=audit.node_id,
        incarnation=audit.incarnation,
        role=_ROLE_TO_WIRE[audit.role],
        integrity=audit.integrity,
        idle=audit.idle,
        num_blocks=audit.num_blocks,
        num_slots=audit.num_slots,
        holders=[_write_holder(holder) for holder in audit.holders],
        blocks=[_write_block(block) for block in audit.blocks],
        slots=[_write_slot(slot) for slot in audit.slots],
    )


def _write_holder(holder: KvHolder) -> node_pb2.KvHolder:
    return node_pb2.KvHolder(
        kind=holder.kind,
        state=holder.state,
        use=holder.use.value,
        attempt_id=values.write_attempt_id(holder.attempt_id),
        samples=holder.samples,
        lease=holder.lease,
        peer=holder.peer,
        age_s=holder.age_s,
    )


def _write_block(block: KvBlock) -> node_pb2.KvBlock:
    return node_pb2.KvBlock(
        block=block.block,
        state=block.state,
        ref=block.ref,
        readers=block.readers,
        writer=block.writer,
        hash=block.hash,
        holders=block.holders,
        age_s=block.age_s,
    )


def _write_slot(slot: KvSlot) -> node_pb2.KvSlot:
    return node_pb2.KvSlot(
        slot=slot.slot, state=slot.state, peer=slot.peer, lease=slot.lease, part=slot.part, age_s=slot.age_s
    )
