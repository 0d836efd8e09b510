"""Streamed answers in SGLang's form: each event has all of an answer up to then, its logprobs included."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import Any

import pydantic_core

from router.generation import Generation
from router.http.chunks import DONE, event
from router.http.sglang.shape import SglangShape
from router.text.answer import Delta

_STEPS = 512
"""The next event of an answer comes when this part of it is new, so that all of them together are at most about so many
times as long as the answer. The first few hundred tokens are events of their own."""


class SglangEvents:
    """What an answer has is kept as JSON, which an event only puts together. The last event of an answer waits for the
    timings of its prompt."""

    keep_alive = b"\n"
    """SGLang's clients take each line that is not empty for an event."""

    def __init__(self, generation: Generation, shape: SglangShape) -> None:
        self._generation = generation
        self._shape = shape
        self._open: dict[int, _Answer] = {}
        self._ended: list[_Answer] = []  # whose last event waits

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        answer = self._open.get(delta.index)
        if answer is None:
            answer = self._open[delta.index] = _Answer(self._beside(delta.index))
        answer.take(delta, self._shape.lists(delta))
        if delta.finish_reason is None:
            return self._event(answer) if answer.has_grown else b""
        self._ended.append(self._open.pop(delta.index))
        return self._last_events()

    def end(self) -> bytes:
        return self._last_events() + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        """After all that has come."""
        behind = [answer for answer in self._open.values() if answer.is_behind]
        return b"".join(map(self._event, [*self._ended, *behind])) + event(body) + DONE

    def _last_events(self) -> bytes:
        """Of those that need not wait any more."""
        told = [answer for answer in self._ended if self._shape.part_of(self._generation, answer.last.index).timings]
        self._ended = [answer for answer in self._ended if answer not in told]
        return b"".join(map(self._event, told))

    def _event(self, answer: _Answer) -> bytes:
        meta = self._shape.meta(self._generation, answer.last, answer.num_tokens, answer.last_token)
        return b"data: %b\n\n" % answer.written(_json(meta))

    def _beside(self, index: int) -> dict[str, Any]:
        prompt = self._shape.prompt(self._shape.part_of(self._generation, index))
        return {**prompt, "index": index} if self._shape.is_batch else prompt


class _Answer:
    """One answer as far as it has come. `last`: its last delta."""

    last: Delta

    def __init__(self, beside: dict[str, Any]) -> None:
        """beside: what is there besides text, ids and `meta_info`."""
        self.num_tokens = 0
        self.last_token: int | None = None
        self._beside = b"," + _json(beside)[1:-1] if beside else b""
        self._text = bytearray()
        self._ids = bytearray()
        self._lists: dict[str, bytearray] = {}
        self._num_written = 0

    def take(self, delta: Delta, lists: dict[str, list[Any]]) -> None:
        self.last = delta
        if delta.token_ids:
            self.num_tokens += len(delta.token_ids)
            self.last_token = delta.token_ids[-1]
        self._text += encode_basestring(delta.text)[1:-1].encode()
        _extend(self._ids, delta.token_ids)
        for name, items in lists.items():
            _extend(self._lists.setdefault(name, bytearray()), items)

    @property
    def has_grown(self) -> bool:
        """By enough for another event."""
        size = self._size
        return (size - self._num_written) * _STEPS >= size

    @property
    def is_behind(self) -> bool:
        return self._size > self._num_written

    @property
    def _size(self) -> int:
        return len(self._beside) + len(self._text) + len(self._ids) + sum(map(len, self._lists.values()))

    def written(self, meta: bytes) -> bytes:
        """meta: the rest of its `meta_info`."""
        self._num_written = self._size
        pieces: list[bytes | bytearray] = [b'{"text":"', self._text, b'","output_ids":[', self._ids]
        pieces += [b'],"meta_info":', meta[:-1]]
        for name, items in self._lists.items():
            pieces += [b',"', name.encode(), b'":[', items, b"]"]
        return b"".join([*pieces, b"}", self._beside, b"}"])


def _extend(array: bytearray, items: Any) -> None:
    """Add to what is between the brackets of an array in JSON."""
    if items:
        array += b"," + _json(items)[1:-1] if array else _json(items)[1:-1]


def _json(content: Any) -> bytes:
    return pydantic_core.to_json(content)
