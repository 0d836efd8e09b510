"""Which nodes serve the same model: a served name has several versions while its nodes are upgraded one by one.

A request is placed on nodes of one version and stays there, since the tokens of two models are not one answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.errors import NodeUnavailable
from baton.node_info import NodeInfo

_ID_CHARS = 12


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """Equal for nodes between which a request may go on: same name, weights, tokenizer and grammars.

    `id`: for people and for logs. `prompt_format`: equal for versions to which the same tokens are the same prompt, and
    which end an answer alike, so that a request of which nothing is told yet may go from one to the other.
    """

    id: str
    name: str
    prompt_format: str = field(default="", compare=False)


class VersionGone(NodeUnavailable):
    """A request cannot go on: the nodes that remain serve another version."""


def version_of(info: NodeInfo) -> ModelVersion:
    name, backend = info.served_model_name, info.structured_outputs_backend.value
    own = _digest(name, info.layout.fingerprint, info.tokenizer_digest, backend)
    special = sorted(info.special_tokens.items())
    ends = info.generation_defaults.eos_token_ids
    prompt_format = _digest(info.tokenizer_digest, backend, info.chat_template, special, ends, info.vocab_size)
    return ModelVersion(f"{name}@{own}", name, prompt_format)


def difference(one: NodeInfo, other: NodeInfo) -> str | None:
    """Why two nodes are of different versions. None: they are of one."""
    for what, mine, theirs in (
        ("served_model_name", one.served_model_name, other.served_model_name),
        ("fingerprint", one.layout.fingerprint, other.layout.fingerprint),
        ("tokenizer_digest", one.tokenizer_digest, other.tokenizer_digest),
        (
            "structured_outputs_backend",
            one.structured_outputs_backend.value,
            other.structured_outputs_backend.value,
        ),
    ):
        if mine != theirs:
            return f"{what} {mine} of {one.node_id} != {theirs} of {other.node_id}"
    return None


def shares(seats: Mapping[ModelVersion, tuple[int, int]]) -> dict[str, float]:
    """How much of a name's requests each version can take, by id. `seats`: of its prefill and of its decode nodes.

    The scarcer role decides, as a share of all the name's nodes of that role. Decode nodes alone count half, since they
    compute prompts too.
    """
    all_prefill, all_decode = (sum(pair[role] for pair in seats.values()) for role in (0, 1))
    return {
        version.id: min(prefill / all_prefill, decode / all_decode) if prefill else decode / all_decode / 2
        for version, (prefill, decode) in seats.items()
        if decode
    }


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:_ID_CHARS]
