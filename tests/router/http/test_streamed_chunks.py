"""Chunks that are written from what came before and after an earlier text: the same bytes as without that."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.sampling import FinishReason
from router.http.chunks import ChunkEvents
from router.http.logprobs import CompletionLogprobs
from router.http.schemas import StreamOptions
from router.http.shapes import ChatShape, CompletionShape, Shape
from router.text.answer import Delta
from tests.router.tiny_tokenizer import tiny_tokenizer

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=6)


class Model:
    name = 'a "model" of 模型'
    tokenizer = tiny_tokenizer()


class Usage:
    num_prompt_tokens, num_completion_tokens, num_cached_tokens = 3, 4, 1


class OneAnswer:
    """As much of a Generation as chunks need."""

    parts = (type("Part", (), {"answers": (0,)}),)
    usage = Usage()
    timings = None


def shapes(kind: str) -> Shape:
    model: Any = Model()
    if kind == "chat":
        return ChatShape("r", model, None, None)
    if kind == "echo":
        return CompletionShape("r", model, None, None, {0: "before"})
    return CompletionShape("r", model, None, {0: (1, 2)} if kind == "ids" else None, {})


def plainly(shape: Shape, deltas: list[Delta]) -> list[bytes]:
    """Each chunk by `json.dumps`, as the router wrote all of them at first."""
    chunks = [shape.chunk(delta) for delta in deltas]
    return [b"data: " + json.dumps(c, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n" for c in chunks]


@given(TEXTS, st.sampled_from(["chat", "completion", "echo", "ids"]))
def test_the_same_bytes_as_from_a_whole_chunk(texts: list[str], kind: str) -> None:
    generation: Any = OneAnswer()
    deltas = [Delta(0, text, (5,)) for text in texts]
    shape, reference = shapes(kind), shapes(kind)
    events = ChunkEvents(generation, shape, None)
    reference._head["created"] = shape._head["created"]  # type: ignore[attr-defined]  # a second may pass between them
    assert [events.delta(delta) for delta in deltas] == plainly(reference, deltas)


def test_the_last_chunk_has_its_reason_and_each_its_usage() -> None:
    generation: Any = OneAnswer()
    events = ChunkEvents(generation, shapes("chat"), StreamOptions(continuous_usage_stats=True))
    chunks = [json.loads(events.delta(Delta(0, text)).removeprefix(b"data: ")) for text in "abc"]
    assert all(chunk["usage"]["total_tokens"] == 7 for chunk in chunks)
    events = ChunkEvents(generation, shapes("chat"), None)
    ending = Delta(0, "c", (), (), FinishReason.STOP)
    assert [bool(events.delta(delta)) for delta in (Delta(0, "a"), Delta(0, "b"), ending)] == [True, True, False]
    last, done = events.end().split(b"\n\n")[:2]
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "stop"
    assert done == b"data: [DONE]"


def test_chunks_with_logprobs_are_written_whole() -> None:
    model: Any = Model()
    shape = CompletionShape("r", model, CompletionLogprobs(model.tokenizer), None, {})
    assert not shape.only_text_changes
