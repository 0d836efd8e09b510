"""What the router knows about the model that its nodes serve: tokenizer, chat template, limits, defaults."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from baton import xgrammar_compiler
from baton.errors import InvalidRequest, NodeUnavailable
from baton.messages import GenerationDefaults, NodeInfo
from baton.structured_output import StructuredBackend
from router.chat import ChatTemplate
from router.tokenizer import Tokenizer, check_digest


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    http_status: ClassVar[int] = 404
    grpc_status: ClassVar[str] = "NOT_FOUND"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`max_model_len` is the shortest context of all nodes in use, in tokens. `chat` is `chat_template`, compiled.
    `block_size`: tokens in a KV block of the first node; 0: not known."""

    name: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    defaults: GenerationDefaults
    chat_template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    structured_outputs_backend: StructuredBackend = StructuredBackend.GUIDANCE
    block_size: int = 0


class Models:
    """The only model that a router serves, as its nodes describe it.

    It is kept when the last node goes, and replaced if the next node to come serves another model.
    """

    def __init__(self) -> None:
        self._model: ServedModel | None = None
        self._nodes: dict[str, NodeInfo] = {}
        self._tokenizers: dict[str, asyncio.Task[Tokenizer]] = {}

    def get(self, name: str | None) -> ServedModel:
        """The model of that name; without a name, the only one. Raises UnknownModel, or NodeUnavailable before any node
        has said what it serves."""
        if self._model is None:
            raise NodeUnavailable("no node has been reached yet, so the model is not known")
        if name and name != self._model.name:
            raise UnknownModel(f"The model `{name}` does not exist. This router serves `{self._model.name}`.", "model")
        return self._model

    async def tokenizer(self, info: NodeInfo, fetch: Callable[[], Awaitable[bytes]]) -> Tokenizer:
        """The node's tokenizer: fetched once for each digest, however many nodes have it. Raises NodeUnavailable."""
        digest = info.tokenizer_digest
        if digest not in self._tokenizers:
            self._tokenizers[digest] = asyncio.create_task(_load(info, fetch))
        task = self._tokenizers[digest]
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._tokenizers.get(digest) is task:
                del self._tokenizers[digest]
            raise

    def join(self, info: NodeInfo, tokenizer: Tokenizer) -> None:
        """The node is in use from now until `leave`.

        Raises NodeUnavailable if it is already in use under another address, serves another model than the nodes in
        use, or compiles structured outputs with another backend, or with one that is not installed here.
        """
        self._check(info)
        if self._model is None or not self._nodes:
            self._model = _model_of(info, tokenizer)
        self._nodes[info.incarnation] = info
        self._model = self._limited(self._model)

    def leave(self, incarnation: str) -> None:
        del self._nodes[incarnation]
        if self._nodes and self._model:
            self._model = self._limited(self._model)

    def _check(self, info: NodeInfo) -> None:
        if info.incarnation in self._nodes:
            raise NodeUnavailable("is configured twice, under different addresses")
        if info.structured_outputs_backend is StructuredBackend.XGRAMMAR and not xgrammar_compiler.is_installed():
            lacking = "which this router cannot check: pip install 'baton-serve[xgrammar]'"
            raise NodeUnavailable(f"compiles structured outputs with xgrammar, {lacking}")
        for node in self._nodes.values():
            if info.served_model_name != node.served_model_name:
                what = f"{info.served_model_name!r}, while {node.node_id} serves {node.served_model_name!r}"
                raise NodeUnavailable(f"serves model {what}")
            if info.tokenizer_digest != node.tokenizer_digest:
                raise NodeUnavailable(f"has another tokenizer than {node.node_id}")
            if info.structured_outputs_backend is not node.structured_outputs_backend:
                own, other = info.structured_outputs_backend.value, node.structured_outputs_backend.value
                raise NodeUnavailable(f"compiles structured outputs with {own}, but {node.node_id} with {other}")

    def _limited(self, model: ServedModel) -> ServedModel:
        return dataclasses.replace(model, max_model_len=min(node.max_model_len for node in self._nodes.values()))


async def _load(info: NodeInfo, fetch: Callable[[], Awaitable[bytes]]) -> Tokenizer:
    data = await fetch()
    check_digest(data, info.tokenizer_digest, info.node_id)
    try:
        return await asyncio.to_thread(Tokenizer, data)  # a large vocabulary takes a second
    except Exception as error:
        raise NodeUnavailable(f"the tokenizer of {info.node_id} cannot be read: {error}") from error


def _model_of(info: NodeInfo, tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name=info.served_model_name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        tokenizer=tokenizer,
        chat=ChatTemplate(info.chat_template, info.special_tokens) if info.chat_template else None,
        chat_template=info.chat_template,
        special_tokens=info.special_tokens,
        defaults=info.generation_defaults,
        structured_outputs_backend=info.structured_outputs_backend,
        block_size=info.layout.block_size,
    )
