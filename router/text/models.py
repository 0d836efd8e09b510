"""What the router knows about the models that its nodes serve: tokenizer, chat template, limits, defaults."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

from baton.errors import InvalidRequest, NodeUnavailable
from baton.node_info import GenerationDefaults, NodeInfo
from baton.sampling import DEFAULT_MAX_LOGPROBS
from baton.structured_output import xgrammar_compiler
from baton.structured_output.constraint import StructuredBackend
from router.text.chat import ChatTemplate
from router.text.tokenizer import Tokenizer, check_digest
from router.versions import ModelVersion, version_of


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    http_status: ClassVar[int] = 404
    grpc_status: ClassVar[str] = "NOT_FOUND"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One version of a model. `max_model_len` is the shortest context of its nodes in use, in tokens; so `max_logprobs`
    is the smallest limit, see NodeInfo. `chat` is `chat_template`, compiled. `block_size`: tokens in a KV block of the
    node that came last; 0: not known. `aliases`: further names by which clients ask for it; to one who did, the alias
    is its `name`."""

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
    version: ModelVersion | None = None
    aliases: tuple[str, ...] = ()
    max_logprobs: int = DEFAULT_MAX_LOGPROBS


class Models:
    """The models that a router serves, as its nodes describe them: of each name one version, or several while its nodes
    are upgraded.

    A version is known from its first node on, for as long as a node of it is in use or an address of the router's nodes
    last served it: while a node restarts, its model does not vanish. `shares` says how much of a name's requests each
    version can take, by id, of which requests are drawn.
    """

    def __init__(
        self, shares: Callable[[str], Mapping[str, float]] = lambda name: {}, draw: Random | None = None
    ) -> None:
        self._shares = shares
        self._draw = draw or Random()
        self._versions: dict[str, ServedModel] = {}  # by id, in order of arrival
        self._nodes: dict[str, NodeInfo] = {}
        self._last_at: dict[str, str] = {}  # address -> id of the version that it served last
        self._tokenizers: dict[str, asyncio.Task[Tokenizer]] = {}

    def get(self, name: str | None) -> ServedModel:
        """A version of the model of that name; without a name, of the only one.

        Raises UnknownModel; InvalidRequest if a name is needed; NodeUnavailable before any node has said what it
        serves.
        """
        if not self._versions:
            raise NodeUnavailable("no node has been reached yet, so the model is not known")
        versions = list(self._versions.values())
        found = versions if not name and len(versions) == 1 else self._of(name or self._only_name())
        if not found:
            raise UnknownModel(f"The model `{name}` does not exist. This router serves {self._listed()}.", "model")
        model = found[0] if len(found) == 1 else self._drawn(found)
        return dataclasses.replace(model, name=name) if name and name != model.name else model

    def served(self) -> list[ServedModel]:
        """One of each name, aliases last, with the smallest limits of its versions. Raises NodeUnavailable before any
        is known."""
        if not self._versions:
            raise NodeUnavailable("no node has been reached yet, so the model is not known")
        of_names = {name: self._of(name) for name in self._all_names()}
        return [
            dataclasses.replace(
                found[0],
                name=name,
                max_model_len=min(model.max_model_len for model in found),
                max_logprobs=min(model.max_logprobs for model in found),
            )
            for name, found in of_names.items()
        ]

    async def tokenizer(self, info: NodeInfo, fetch: Callable[[], Awaitable[bytes]]) -> Tokenizer:
        """The node's tokenizer: fetched once for each digest, however many nodes have it; from this node if another one
        has failed to send it, or was removed meanwhile. Raises NodeUnavailable, and what `fetch` does."""
        digest = info.tokenizer_digest
        while True:
            if is_own := digest not in self._tokenizers:
                self._tokenizers[digest] = asyncio.create_task(_load(info, fetch))
            task = self._tokenizers[digest]
            try:
                return await asyncio.shield(task)
            except BaseException:
                if task.done() and self._tokenizers.get(digest) is task:
                    del self._tokenizers[digest]
                if is_own or not task.done() or _is_cancelled():
                    raise

    def join(self, info: NodeInfo, tokenizer: Tokenizer, address: str = "") -> None:
        """The node, which the router knows by `address`, is in use from now until `leave`. Of the nodes of a version,
        the last one to come describes it.

        Raises NodeUnavailable if it is already in use under another address, or compiles structured outputs with a
        backend that is not installed here.
        """
        self._check(info)
        version = version_of(info)
        self._nodes[info.incarnation] = info
        self._last_at[address or info.address] = version.id
        self._versions[version.id] = _described(self._versions.get(version.id), version, info, tokenizer)
        self._limit(version.id)
        self._prune()

    def leave(self, incarnation: str) -> None:
        version = version_of(self._nodes.pop(incarnation))
        self._limit(version.id)
        self._prune()

    def forget(self, address: str) -> None:
        """The router has no node at that address any more."""
        self._last_at.pop(address, None)
        self._prune()

    def _check(self, info: NodeInfo) -> None:
        if info.incarnation in self._nodes:
            raise NodeUnavailable("is configured twice, under different addresses")
        if info.structured_outputs_backend is StructuredBackend.XGRAMMAR and not xgrammar_compiler.is_installed():
            lacking = "which this router cannot check: pip install 'baton-serve[xgrammar]'"
            raise NodeUnavailable(f"compiles structured outputs with xgrammar, {lacking}")

    # ---- names and versions ----

    def _names(self) -> list[str]:
        return list(dict.fromkeys(model.name for model in self._versions.values()))

    def _all_names(self) -> list[str]:
        """With aliases, last."""
        aliases = [alias for model in self._versions.values() for alias in model.aliases]
        return list(dict.fromkeys([*self._names(), *aliases]))

    def _listed(self) -> str:
        return ", ".join(f"`{name}`" for name in self._all_names())

    def _of(self, name: str) -> list[ServedModel]:
        """Those of that name, else those with such an alias, of one name."""
        versions = list(self._versions.values())
        found = [model for model in versions if model.name == name]
        if found:
            return found
        aliased = [model for model in versions if name in model.aliases]
        return [model for model in aliased if model.name == aliased[0].name]

    def _only_name(self) -> str:
        """Of several names, that of which nodes are in use counts, if there is only one."""
        names = self._names()
        used = {info.served_model_name for info in self._nodes.values()}
        if len(names) > 1 and len(used) != 1:
            raise InvalidRequest(f"model must be named: this router serves {self._listed()}.", "model")
        return used.pop() if len(names) > 1 else names[0]

    def _drawn(self, found: list[ServedModel]) -> ServedModel:
        """One of several versions. If none can take a request, the newest may be the first that can."""
        shares = self._shares(found[0].name)
        weights = [shares.get(model.version.id, 0.0) if model.version else 0.0 for model in found]
        return self._draw.choices(found, weights)[0] if any(weights) else found[-1]

    def _limit(self, version_id: str) -> None:
        """The smallest limits of a version's nodes in use count; without one, the last that did."""
        nodes = [node for node in self._nodes.values() if version_of(node).id == version_id]
        if nodes:
            self._versions[version_id] = dataclasses.replace(
                self._versions[version_id],
                max_model_len=min(node.max_model_len for node in nodes),
                max_logprobs=min(node.max_logprobs for node in nodes),
            )

    def _prune(self) -> None:
        known = {version_of(node).id for node in self._nodes.values()}.union(self._last_at.values())
        self._versions = {version_id: model for version_id, model in self._versions.items() if version_id in known}
        digests = {model.tokenizer.digest for model in self._versions.values()}
        for digest in [digest for digest, task in self._tokenizers.items() if task.done() and digest not in digests]:
            del self._tokenizers[digest]


async def _load(info: NodeInfo, fetch: Callable[[], Awaitable[bytes]]) -> Tokenizer:
    data = await fetch()
    check_digest(data, info.tokenizer_digest, info.node_id)
    try:
        return await asyncio.to_thread(Tokenizer, data)  # a large vocabulary takes a second
    except Exception as error:
        raise NodeUnavailable(f"the tokenizer of {info.node_id} cannot be read: {error}") from error


def _is_cancelled() -> bool:
    """Whether the running task is to end, rather than one that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _described(known: ServedModel | None, version: ModelVersion, info: NodeInfo, tokenizer: Tokenizer) -> ServedModel:
    """The version as this node describes it; `known`: as others did."""
    if known is not None and (known.chat_template, known.special_tokens) == (info.chat_template, info.special_tokens):
        block_size = info.layout.block_size
        return dataclasses.replace(
            known,
            version=version,
            defaults=info.generation_defaults,
            block_size=block_size,
            aliases=info.model_aliases,
        )
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
        version=version,
        aliases=info.model_aliases,
        max_logprobs=info.max_logprobs,
    )
