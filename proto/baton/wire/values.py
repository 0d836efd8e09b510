"""Values that several messages contain: token ids, attempt ids, errors, layouts."""

from __future__ import annotations

import array
import functools
import importlib
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from baton.block_hash import HASH_BYTES, BlockHash
from baton.errors import BatonError, InvalidRequest, from_code
from baton.kv_groups import MAX_GROUPS
from baton.layout import MAX_LAYERS, MAX_RANKS, KvLayout, KvSlice, LayerKv
from baton.messages import AttemptId, Auth, Sample, TokenLogprobs
from baton.node_info import TransportEndpoint
from baton.sampling import MAX_CACHE_SALT_CHARS, FinishReason
from baton.top_tokens import PackedTop, top_tokens
from baton.v1 import common_pb2, node_pb2
from baton.wire.limits import (
    ANY,
    MAX_ADDRESS_BYTES,
    MAX_ENDPOINTS,
    MAX_ERROR_CHARS,
    MAX_NAME_CHARS,
    MAX_SAMPLES,
    MAX_SECONDS,
    Limits,
)

TOKEN_BYTES = 4
_NUM_ATTEMPT_IDS = 16_384
"""Remembered, since each token names its attempt; more than are live at once."""
_MANY_TOKENS = 1024
"""From so many on, numpy finds the largest: of 32,000 in 4 us instead of 400."""
_SWAP = sys.byteorder == "big"
_HASH = struct.Struct(f"{HASH_BYTES}s")

_FINISH_TO_WIRE = {
    FinishReason.STOP: node_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: node_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {int(wire): reason for reason, wire in _FINISH_TO_WIRE.items()}


def pack_tokens(tokens: Sequence[int], param: str = "token ids") -> bytes:
    """Encode token ids as little-endian uint32. Raises InvalidRequest for one that does not fit."""
    try:
        packed = array.array("I", tokens)
    except (OverflowError, TypeError):
        raise InvalidRequest(f"{param}: a token id is not an unsigned 32-bit number", param) from None
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes, param: str = "token ids") -> tuple[int, ...]:
    """The reverse of `pack_tokens`. Raises InvalidRequest if bytes are left over."""
    if len(data) == TOKEN_BYTES:  # one token, as for most requests of a step: this takes a quarter of the time
        return (int.from_bytes(data, "little"),)
    return tuple(_unpack(data, param))


def read_tokens(data: bytes, limits: Limits, param: str = "token ids") -> tuple[int, ...]:
    """Valid token ids of the model, at most as many as its context. Raises InvalidRequest before unpacking too many."""
    return tuple(read_prompt(data, limits, param))


def read_prompt(data: bytes, limits: Limits, param: str = "prompt") -> array.array[int]:
    """`read_tokens` as an array, since a prompt may be long: a tuple of 32,000 ints takes a megabyte, and half a
    millisecond in which no other thread runs."""
    if len(data) > TOKEN_BYTES * limits.max_model_len:
        raise InvalidRequest(f"{param}: {len(data) // TOKEN_BYTES} tokens are more than {limits.max_model_len}", param)
    tokens = _unpack(data, param)
    _check_ids(tokens, limits, param)
    return tokens


def _check_ids(tokens: array.array[int], limits: Limits, param: str) -> None:
    if tokens and (largest := _largest(tokens)) >= limits.vocab_size:
        raise InvalidRequest(f"{param}: token ids must be in [0, {limits.vocab_size}), not {largest}", param)


def _unpack(data: bytes, param: str) -> array.array[int]:
    if len(data) % TOKEN_BYTES:
        raise InvalidRequest(f"{param}: {len(data)} bytes are not a multiple of {TOKEN_BYTES}", param)
    tokens = array.array("I", data)
    if _SWAP:
        tokens.byteswap()
    return tokens


def _largest(tokens: array.array[int]) -> int:
    if len(tokens) < _MANY_TOKENS or (numpy := _numpy()) is None:
        return max(tokens)
    return int(numpy.frombuffer(tokens, numpy.uint32).max())


@functools.cache
def _numpy() -> Any:
    """numpy, which is installed where models are; elsewhere None."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def read_below(value: int, end: int, param: str) -> int:
    """An unsigned number, unchanged. Raises InvalidRequest for `end` or more."""
    if value >= end:
        raise InvalidRequest(f"{param} must be below {end}, not {value}", param)
    return value


def read_text(value: str, param: str) -> str:
    """A text that is safe in a log line. Raises InvalidRequest if it is too long or not printable."""
    if len(value) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{param}: {len(value)} characters are more than {MAX_NAME_CHARS}", param)
    if not value.isprintable():
        raise InvalidRequest(f"{param} is not printable: {value!r}", param)
    return value


def read_name(value: str, param: str) -> str:
    """A non-empty `read_text`. Also raises InvalidRequest if it is empty."""
    if not value:
        raise InvalidRequest(f"{param} is empty", param)
    return read_text(value, param)


def read_salt(value: str) -> str:
    if len(value) > MAX_CACHE_SALT_CHARS:
        text = f"cache_salt: {len(value)} characters are more than {MAX_CACHE_SALT_CHARS}"
        raise InvalidRequest(text, "cache_salt")
    return value


def write_hashes(hashes: Sequence[BlockHash]) -> bytes:
    return b"".join(hashes)


def read_hashes(data: bytes, param: str = "block_hashes") -> tuple[BlockHash, ...]:
    if len(data) % HASH_BYTES:
        raise InvalidRequest(f"{param}: {len(data)} bytes are not a multiple of {HASH_BYTES}", param)
    return tuple([block_hash for (block_hash,) in _HASH.iter_unpack(data)])


def read_seconds(value: float, param: str, most: float = MAX_SECONDS) -> float:
    """A duration, capped to `most`. Raises InvalidRequest if it is negative, infinite or NaN."""
    if not 0.0 <= value < math.inf:
        raise InvalidRequest(f"{param} must be 0 or more seconds, not {value}", param)
    return value if value <= most else most


def read_rate(value: float, param: str) -> float:
    """A number per second, 0 if it is so small that nobody waits for it: a quotient would be infinite. Raises
    InvalidRequest if it is negative, infinite or NaN."""
    if not 0.0 <= value < math.inf:
        raise InvalidRequest(f"{param} must be 0 or more per second, not {value}", param)
    return value if value * MAX_SECONDS >= 1.0 else 0.0


def write_time_left(seconds: float) -> float:
    """A deadline as a duration; 0 if it has passed, as it may have since the sender last read its clock."""
    return max(0.0, seconds)


def write_auth(auth: Auth) -> node_pb2.Auth:
    return node_pb2.Auth(name=auth.name, nonce=auth.nonce, proof=auth.proof)


def read_auth(wire: node_pb2.Auth) -> Auth:
    return Auth(wire.name, wire.nonce, wire.proof)


def write_attempt_id(attempt_id: AttemptId) -> common_pb2.AttemptId:
    return common_pb2.AttemptId(
        router_epoch=attempt_id.router_epoch, request_id=attempt_id.request_id, attempt=attempt_id.attempt
    )


def read_attempt_id(wire: common_pb2.AttemptId) -> AttemptId:
    return _attempt_id(wire.router_epoch, wire.request_id, wire.attempt)


@functools.lru_cache(maxsize=_NUM_ATTEMPT_IDS)
def _attempt_id(router_epoch: int, request_id: str, attempt: int) -> AttemptId:
    """Checked and made once for all tokens of an attempt."""
    if not 0 < len(request_id) <= MAX_NAME_CHARS or not request_id.isprintable():
        raise InvalidRequest("attempt_id names no request", "attempt_id")
    return AttemptId(router_epoch, request_id, attempt)


def attempt_of(message: node_pb2.RouterMessage | node_pb2.PrefillMessage | node_pb2.DecodeMessage) -> AttemptId | None:
    """The attempt that a message is about, which fails if the rest is malformed. None: the message names none."""
    kind = message.WhichOneof("kind")
    about: Any = getattr(message, kind) if kind else message
    if "attempt_id" not in about.DESCRIPTOR.fields_by_name:
        return None
    try:
        return read_attempt_id(about.attempt_id)
    except InvalidRequest:
        return None


def write_samples(samples: Iterable[Sample]) -> list[common_pb2.Sample]:
    return [common_pb2.Sample(index=s.index, output_tokens=pack_tokens(s.output_tokens)) for s in samples]


def read_samples(wire: Sequence[common_pb2.Sample], limits: Limits, most_shared: int) -> tuple[Sample, ...]:
    """At least one sample, with unique indexes and equally long outputs. Several samples have at most `most_shared`
    output tokens, since they share the KV of all earlier ones. Raises InvalidRequest."""
    if not wire:
        raise InvalidRequest("samples: none given", "samples")
    if len(wire) > MAX_SAMPLES:
        raise InvalidRequest(f"samples: {len(wire)} are more than {MAX_SAMPLES}", "samples")
    if len({len(s.output_tokens) for s in wire}) != 1:
        raise InvalidRequest("samples: outputs differ in length", "samples")
    if len(wire) > 1 and len(wire[0].output_tokens) > TOKEN_BYTES * most_shared:
        raise InvalidRequest("samples: several with such output cannot share one prefill", "samples")
    indexes = [read_below(s.index, MAX_SAMPLES, "samples") for s in wire]
    if len(set(indexes)) != len(indexes):
        raise InvalidRequest("samples: an index is given twice", "samples")
    return tuple(Sample(s.index, read_tokens(s.output_tokens, limits, "output_tokens")) for s in wire)


def read_indexes(wire: Sequence[int]) -> tuple[int, ...]:
    """Some samples of a request, by index. Raises InvalidRequest."""
    if len(wire) > MAX_SAMPLES or (wire and max(wire) >= MAX_SAMPLES):
        raise InvalidRequest(f"samples: indexes must be below {MAX_SAMPLES}", "samples")
    return tuple(wire)


def write_finish_reason(reason: FinishReason) -> node_pb2.FinishReason:
    return _FINISH_TO_WIRE[reason]


def read_finish_reason(wire: int) -> FinishReason:
    reason = _FINISH_FROM_WIRE.get(wire)
    if reason is None:
        raise InvalidRequest(f"finish reason {wire} is not known here", "reason")
    return reason


def write_logprobs(logprobs: Iterable[TokenLogprobs]) -> list[node_pb2.TokenLogprobs]:
    written = []
    for entry in logprobs:
        written.append(wire := node_pb2.TokenLogprobs())
        fill_token_logprobs(wire, entry)
    return written


def fill_token_logprobs(wire: node_pb2.TokenLogprobs, entry: TokenLogprobs) -> None:
    """Fill an empty message."""
    wire.logprob = entry.logprob
    top = entry.top
    if isinstance(top, PackedTop):
        wire.top_token_ids = pack_tokens(top.ids)
        wire.top_logprobs.extend(top.logprobs)
    elif top:
        tokens, numbers = zip(*top, strict=True)
        wire.top_token_ids = pack_tokens(tokens)
        wire.top_logprobs.extend(numbers)


def read_logprobs(wire: Iterable[node_pb2.TokenLogprobs], limits: Limits = ANY) -> tuple[TokenLogprobs, ...]:
    return tuple(_read_token_logprobs(entry, limits) for entry in wire)


def _read_token_logprobs(wire: node_pb2.TokenLogprobs, limits: Limits) -> TokenLogprobs:
    num_top = len(wire.top_logprobs)
    if num_top > limits.max_logprobs:
        raise InvalidRequest(f"{num_top} top tokens are more than {limits.max_logprobs}", "logprobs")
    tokens = _unpack(wire.top_token_ids, "top_token_ids")
    if len(tokens) != num_top:
        raise InvalidRequest(f"{len(tokens)} top tokens with {num_top} logprobs", "logprobs")
    _check_ids(tokens, limits, "top_token_ids")
    logprobs = array.array("f", wire.top_logprobs)
    if not (wire.logprob < math.inf and are_logprobs(logprobs)):
        raise InvalidRequest("logprobs: one is no number", "logprobs")
    return TokenLogprobs(wire.logprob, top_tokens(tokens, logprobs))


def are_logprobs(values: array.array[float]) -> bool:
    """Whether all are numbers. Minus infinity is a valid logprob."""
    if len(values) < _MANY_TOKENS or (numpy := _numpy()) is None:
        return all(value < math.inf for value in values)  # each, because max() may miss a NaN
    return bool((numpy.frombuffer(values, numpy.float32) < math.inf).all())


def write_error(error: BatonError | None) -> common_pb2.Error | None:
    """None stays None, and protobuf then leaves the field unset. Halves of surrogate pairs, of which a message cannot
    consist, are written as escapes: third-party code may say anything of what a client has given it."""
    if error is None:
        return None
    return common_pb2.Error(code=error.code, message=error.message.encode(errors="backslashreplace").decode())


def read_error(wire: common_pb2.Error) -> BatonError:
    return from_code(wire.code, wire.message[:MAX_ERROR_CHARS])


def write_layout(layout: KvLayout) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(
        block_size=layout.block_size,
        fingerprint=layout.fingerprint,
        layers=[
            common_pb2.LayerKv(
                num_kv_heads=layer.num_kv_heads,
                head_dim_k=layer.head_dim_k,
                head_dim_v=layer.head_dim_v,
                dtype=layer.dtype,
                sliding_window=layer.sliding_window or 0,
                state_bytes=layer.state_bytes,
                scale_dtype=layer.scale_dtype,
            )
            for layer in layout.layers
        ],
        ranks=[common_pb2.KvSlice(**rank._asdict()) for rank in layout.ranks],
        groups=[common_pb2.KvGroup(layers=group) for group in layout.groups],
    )


def read_layout(wire: common_pb2.KvLayout) -> KvLayout:
    """Raises InvalidRequest for invalid layers, groups or ranks, for blocks without tokens or bytes, and for texts that
    are too long or not printable."""
    if len(wire.groups) > MAX_GROUPS or sum(len(group.layers) for group in wire.groups) > len(wire.layers):
        raise InvalidRequest(f"layout: {len(wire.groups)} groups of {len(wire.layers)} layers", "layout")
    if len(wire.layers) > MAX_LAYERS or len(wire.ranks) > MAX_RANKS:
        raise InvalidRequest(f"layout: {len(wire.layers)} layers on {len(wire.ranks)} ranks", "layout")
    try:
        layout = KvLayout(
            layers=tuple(map(_read_layer, wire.layers)),
            block_size=wire.block_size,
            fingerprint=read_text(wire.fingerprint, "fingerprint"),
            ranks=tuple(KvSlice(r.layer_start, r.layer_end, r.head_start, r.head_end) for r in wire.ranks),
            groups=tuple(tuple(group.layers) for group in wire.groups),
        )
    except ValueError as error:
        raise InvalidRequest(f"layout: {error}", "layout") from None
    if not all(map(layout.num_bytes, layout.ranks)):
        raise InvalidRequest("layout: a rank's blocks have no bytes", "layout")
    return layout


def _read_layer(wire: common_pb2.LayerKv) -> LayerKv:
    """Raises ValueError or InvalidRequest."""
    return LayerKv(
        num_kv_heads=wire.num_kv_heads,
        head_dim_k=wire.head_dim_k,
        head_dim_v=wire.head_dim_v,
        dtype=read_text(wire.dtype, "dtype"),
        sliding_window=wire.sliding_window or None,
        state_bytes=wire.state_bytes,
        scale_dtype=read_text(wire.scale_dtype, "scale_dtype"),
    )


def write_endpoints(endpoints: Iterable[TransportEndpoint]) -> list[common_pb2.TransportEndpoint]:
    return [common_pb2.TransportEndpoint(rank=e.rank, transport=e.transport, address=e.address) for e in endpoints]


def read_endpoints(wire: Sequence[common_pb2.TransportEndpoint]) -> tuple[TransportEndpoint, ...]:
    """Raises InvalidRequest for more endpoints or longer addresses than any node has."""
    if len(wire) > MAX_ENDPOINTS:
        raise InvalidRequest(f"endpoints: {len(wire)} are more than {MAX_ENDPOINTS}", "endpoints")
    for endpoint in wire:
        if len(endpoint.address) > MAX_ADDRESS_BYTES:
            raise InvalidRequest(f"endpoints: an address of {len(endpoint.address)} bytes", "endpoints")
    return tuple(TransportEndpoint(e.rank, read_text(e.transport, "transport"), e.address) for e in wire)
