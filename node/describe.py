"""What a node serves, with a real or a simulated model, and the node's description of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import baton
from baton.layout import KvLayout
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole, TransportEndpoint
from baton.structured_output.constraint import StructuredBackend
from baton.telemetry import ExpertReadings
from engine.engine import Engine
from node.loop import Counts
from node.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`json`: a tokenizer.json. `special_tokens`: bos_token, eos_token, ... by name, for the chat template.
    `eos_token_id`: None if there is none, or it is not known."""

    json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    eos_token_id: int | None = None

    @property
    def digest(self) -> str:
        """sha256, hex."""
        return hashlib.sha256(self.json).hexdigest()


class ServedModel(Protocol):
    """An engine with all that a role is built on: `build.LoadedModel`, or `simulated.SimulatedModel`.

    pools: the KV pool of each rank, see `KvMover`. graph_sizes: empty without CUDA graphs. experts: None if chosen
    experts are not counted.
    """

    @property
    def engine(self) -> Engine: ...

    @property
    def graph_sizes(self) -> list[int]: ...

    @property
    def experts(self) -> ExpertReadings | None: ...

    @property
    def layer_groups(self) -> int: ...

    @property
    def pools(self) -> Sequence[Any]: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def served_model_name(self) -> str: ...

    @property
    def tokenizer(self) -> TokenizerFiles: ...

    @property
    def generation_defaults(self) -> GenerationDefaults: ...

    def warm_up(self) -> None:
        """On the engine's thread, before any request."""


def describe(
    settings: NodeSettings, role: NodeRole, built: ServedModel, incarnation: str, addresses: Sequence[bytes]
) -> NodeInfo:
    """The node's description, without its address. addresses: those of its ranks' transports."""
    config, tokenizer = built.engine.config, built.tokenizer
    return NodeInfo(
        role=role,
        incarnation=incarnation,
        node_id=settings.name(role),
        address="",
        served_model_name=built.served_model_name,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_blocks=built.engine.blocks.num_total,
        layout=built.layout,
        endpoints=tuple(
            TransportEndpoint(rank, settings.carried_by, address) for rank, address in enumerate(addresses)
        ),
        tokenizer_digest=tokenizer.digest,
        chat_template=settings.read_chat_template() or tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        generation_defaults=settings.generation_defaults(built.generation_defaults),
        vocab_size=config.vocab_size,
        version=baton.__version__,
        model_aliases=settings.served_model_name[1:],
        max_logprobs=config.max_logprobs,
        structured_outputs_backend=StructuredBackend(settings.structured_outputs_backend),
    )


def count(built: ServedModel, num_damaged_pieces: int = 0) -> Counts:
    """For metrics. Engine's thread only."""
    engine = built.engine
    blocks = {state.value: number for state, number in engine.blocks.counts_by_state().items()}
    return Counts(blocks, engine.num_preemptions, num_damaged_pieces, engine.counters.totals())
