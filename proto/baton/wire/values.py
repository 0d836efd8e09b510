"""Values that several messages carry: token ids, names of work, sampling, errors, layouts."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Iterable, Sequence

from baton.block_hash import HASH_BYTES, BlockHash
from baton.errors import BatonError, InvalidRequest, from_code
from baton.layout import KvLayout
from baton.messages import Auth, Sample, TokenLogprobs, TransportEndpoint, WorkId
from baton.sampling import FinishReason, SamplingParams
from baton.v1 import common_pb2, node_pb2

_TOKEN_BYTES = 4
_SWAP = sys.byteorder == "big"

_FINISH_TO_WIRE = {
    FinishReason.STOP: node_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: node_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {int(wire): reason for reason, wire in _FINISH_TO_WIRE.items()}


def pack_tokens(tokens: Sequence[int], param: str = "token ids") -> bytes:
    """Token ids as little-endian uint32 each. Raises InvalidRequest for one that does not fit."""
    try:
        packed = array.array("I", tokens)
    except (OverflowError, TypeError):
        raise InvalidRequest(f"{param}: a token id is not an unsigned 32-bit number", param) from None
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes, param: str = "token ids") -> tuple[int, ...]:
    """The reverse of `pack_tokens`. Raises InvalidRequest when bytes are left over."""
    if len(data) % _TOKEN_BYTES:
        raise InvalidRequest(f"{param}: {len(data)} bytes are not a multiple of {_TOKEN_BYTES}", param)
    if not _SWAP:
        return tuple(memoryview(data).cast("I"))
    packed = array.array("I", data)
    packed.byteswap()
    return tuple(packed)


def write_hashes(hashes: Sequence[BlockHash]) -> bytes:
    return b"".join(hashes)


def read_hashes(data: bytes) -> tuple[BlockHash, ...]:
    if len(data) % HASH_BYTES:
        raise InvalidRequest(f"block_hashes: {len(data)} bytes are not a multiple of {HASH_BYTES}", "block_hashes")
    return tuple(data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES))


def read_seconds(value: float, param: str) -> float:
    """A duration as it came. Raises InvalidRequest for a negative, infinite or undefined one."""
    if not 0.0 <= value < math.inf:
        raise InvalidRequest(f"{param} must be 0 or more seconds, not {value}", param)
    return value


def write_auth(auth: Auth) -> node_pb2.Auth:
    return node_pb2.Auth(name=auth.name, nonce=auth.nonce, proof=auth.proof)


def read_auth(wire: node_pb2.Auth) -> Auth:
    return Auth(wire.name, wire.nonce, wire.proof)


def write_work(work: WorkId) -> common_pb2.WorkId:
    return common_pb2.WorkId(router_epoch=work.router_epoch, request_id=work.request_id, attempt=work.attempt)


def read_work(wire: common_pb2.WorkId) -> WorkId:
    if not wire.request_id:
        raise InvalidRequest("work names no request", "work")
    return WorkId(wire.router_epoch, wire.request_id, wire.attempt)


def write_samples(samples: Iterable[Sample]) -> list[common_pb2.Sample]:
    return [common_pb2.Sample(index=s.index, output_tokens=pack_tokens(s.output_tokens)) for s in samples]


def read_samples(wire: Sequence[common_pb2.Sample]) -> tuple[Sample, ...]:
    """At least one sample, no index twice, outputs of one length. Raises InvalidRequest."""
    samples = tuple(Sample(s.index, unpack_tokens(s.output_tokens, "output_tokens")) for s in wire)
    if not samples:
        raise InvalidRequest("samples: none given", "samples")
    if len({s.index for s in samples}) != len(samples):
        raise InvalidRequest("samples: an index is given twice", "samples")
    if len({len(s.output_tokens) for s in samples}) != 1:
        raise InvalidRequest("samples: outputs differ in length", "samples")
    return samples


def write_sampling(params: SamplingParams) -> common_pb2.SamplingParams:
    """Raises InvalidRequest for a number that does not fit its field (a token id or top_k beyond 31 bits)."""
    try:
        return common_pb2.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            seed=params.seed,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            num_logprobs=params.num_logprobs,
        )
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"sampling parameters: {error}", "sampling") from None


def read_sampling(wire: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=dict(wire.logit_bias),
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        ignore_eos=wire.ignore_eos,
        stop_token_ids=tuple(wire.stop_token_ids),
        num_logprobs=wire.num_logprobs,
    )


def write_finish_reason(reason: FinishReason) -> node_pb2.FinishReason:
    return _FINISH_TO_WIRE[reason]


def read_finish_reason(wire: int) -> FinishReason:
    reason = _FINISH_FROM_WIRE.get(wire)
    if reason is None:
        raise InvalidRequest(f"finish reason {wire} is not known here", "reason")
    return reason


def write_logprobs(logprobs: Iterable[TokenLogprobs]) -> list[node_pb2.TokenLogprobs]:
    return [
        node_pb2.TokenLogprobs(
            logprob=entry.logprob,
            top_token_ids=pack_tokens([token for token, _ in entry.top]),
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in logprobs
    ]


def read_logprobs(wire: Iterable[node_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(_read_token_logprobs(entry) for entry in wire)


def _read_token_logprobs(wire: node_pb2.TokenLogprobs) -> TokenLogprobs:
    tokens = unpack_tokens(wire.top_token_ids, "top_token_ids")
    if len(tokens) != len(wire.top_logprobs):
        raise InvalidRequest(f"{len(tokens)} top tokens with {len(wire.top_logprobs)} logprobs", "logprobs")
    return TokenLogprobs(wire.logprob, tuple(zip(tokens, wire.top_logprobs, strict=True)))


def write_error(error: BatonError | None) -> common_pb2.Error | None:
    """None stays None: protobuf leaves a field unset that is given None."""
    return None if error is None else common_pb2.Error(code=error.code, message=error.message)


def read_error(wire: common_pb2.Error) -> BatonError:
    return from_code(wire.code, wire.message)


def write_layout(layout: KvLayout) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim_k=layout.head_dim_k,
        head_dim_v=layout.head_dim_v,
        block_size=layout.block_size,
        dtype=layout.dtype,
        head_start=layout.head_start,
        head_end=layout.head_end,
        block_bytes=layout.block_bytes,
        fingerprint=layout.fingerprint,
    )


def read_layout(wire: common_pb2.KvLayout) -> KvLayout:
    if not wire.block_size:
        raise InvalidRequest("layout: block_size is 0", "layout")
    return KvLayout(
        num_layers=wire.num_layers,
        num_kv_heads=wire.num_kv_heads,
        head_dim_k=wire.head_dim_k,
        head_dim_v=wire.head_dim_v,
        block_size=wire.block_size,
        dtype=wire.dtype,
        head_start=wire.head_start,
        head_end=wire.head_end,
        block_bytes=wire.block_bytes,
        fingerprint=wire.fingerprint,
    )


def write_endpoints(endpoints: Iterable[TransportEndpoint]) -> list[common_pb2.TransportEndpoint]:
    return [common_pb2.TransportEndpoint(rank=e.rank, transport=e.transport, address=e.address) for e in endpoints]


def read_endpoints(wire: Iterable[common_pb2.TransportEndpoint]) -> tuple[TransportEndpoint, ...]:
    return tuple(TransportEndpoint(e.rank, e.transport, e.address) for e in wire)
