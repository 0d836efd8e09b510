"""The block hashes of requests: those that the nodes' engines give the same prompts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from baton.errors import NodeUnavailable
from baton.messages import AttemptId
from baton.node_info import NodeRole
from engine.sequence import Sequence
from router.requests.admission import Admission
from router.requests.request_state import RoutedRequest
from router.service import Service
from router.text.generation_request import GenerationRequest
from router.text.models import Models, ServedModel
from tests.router.fake_node import node_info
from tests.router.tiny_tokenizer import tiny_tokenizer


class Notes:
    """Notes requests in place of a dispatcher, and refuses them."""

    def __init__(self) -> None:
        self.request: RoutedRequest | None = None

    def submit(self, request: RoutedRequest, sink: Any, received: float) -> None:
        self.request = request
        raise NodeUnavailable("noted")

    def cancel(self, request_id: str) -> None: ...


def served(block_size: int) -> ServedModel:
    models, info = Models(), node_info(NodeRole.PREFILL, "p", "here")
    models.join(
        dataclasses.replace(info, layout=dataclasses.replace(info.layout, block_size=block_size)), tiny_tokenizer()
    )
    return models.get(None)


async def submitted(model: ServedModel, wanted: GenerationRequest) -> RoutedRequest:
    notes = Notes()
    service = Service(notes, Models(), 60.0, Admission(), 8)  # type: ignore[arg-type]
    with pytest.raises(NodeUnavailable, match="noted"):
        await service.generate(model, (wanted,), time.monotonic(), service.admit(model, [1]), None, None)
    service.close(wait=True)
    assert notes.request
    return notes.request


def as_the_engine_computes_them(request: RoutedRequest, block_size: int) -> tuple[bytes, ...]:
    work = AttemptId(1, request.request_id, 0), [0], request.prompt_tokens, request.sampling
    sequence = Sequence(*work, cache_salt=request.cache_salt)
    return tuple(sequence.block_hashes(len(request.prompt_tokens) // block_size, block_size))


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("prompt", ["the quick brown fox jumps over the lazy dog " * 3, tuple(range(2, 40))])
@pytest.mark.parametrize("block_size", [4, 16])
async def test_block_hashes_are_those_of_the_engine(block_size, prompt, salt):
    wanted = GenerationRequest(request_id="r", prompts=(prompt,), cache_salt=salt, sampling={"max_tokens": 2})
    request = await submitted(served(block_size), wanted)
    assert len(request.block_hashes) == len(request.prompt_tokens) // block_size > 0
    assert request.block_hashes == as_the_engine_computes_them(request, block_size)
