"""Logprobs of a prompt, in the messages of nodes and in those of the public API."""

from __future__ import annotations

from baton.errors import InvalidRequest
from baton.prompt_logprobs import NUMBER_BYTES, PromptLogprobs, most_piece_tokens, unpack_floats, unpack_ids
from baton.v1 import node_pb2
from baton.wire.limits import ANY, Limits
from baton.wire.values import are_logprobs

_PARAM = "prompt_logprobs"


def write_prompt_logprobs(said: PromptLogprobs) -> node_pb2.PromptLogprobs:
    return node_pb2.PromptLogprobs(
        first_index=said.first_index,
        num_top=said.num_top,
        logprobs=said.logprobs,
        ranks=said.ranks,
        top_token_ids=said.top_token_ids,
        top_logprobs=said.top_logprobs,
    )


def read_prompt_logprobs(wire: node_pb2.PromptLogprobs, limits: Limits = ANY) -> PromptLogprobs:
    """Raises InvalidRequest if the sizes disagree, or a number is out of range."""
    size, num_top = len(wire.logprobs), wire.num_top
    if num_top > limits.max_logprobs:
        raise InvalidRequest(f"{_PARAM}: {num_top} top tokens are more than {limits.max_logprobs}", _PARAM)
    most = most_piece_tokens(num_top)
    if not size or size % NUMBER_BYTES or size > most * NUMBER_BYTES:
        raise InvalidRequest(f"{_PARAM}: {size} bytes are not 1 to {most} numbers", _PARAM)
    sizes = (len(wire.ranks), len(wire.top_token_ids), len(wire.top_logprobs))
    if sizes != (size, size * num_top, size * num_top):
        raise InvalidRequest(f"{_PARAM}: {sizes} bytes of other numbers do not fit {size} of logprobs", _PARAM)
    if not 1 <= wire.first_index <= limits.max_model_len - size // NUMBER_BYTES:
        raise InvalidRequest(f"{_PARAM}: first_index {wire.first_index} is outside the context", _PARAM)
    ids = unpack_ids(wire.top_token_ids)
    if ids and max(ids) >= limits.vocab_size:
        raise InvalidRequest(f"{_PARAM}: token id {max(ids)} is outside [0, {limits.vocab_size})", _PARAM)
    if not all(are_logprobs(unpack_floats(data)) for data in (wire.logprobs, wire.top_logprobs)):
        raise InvalidRequest(f"{_PARAM}: one is no number", _PARAM)
    return PromptLogprobs(wire.first_index, num_top, wire.logprobs, wire.ranks, wire.top_token_ids, wire.top_logprobs)
