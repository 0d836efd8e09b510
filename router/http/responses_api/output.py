"""A response's output: items that grow with the answer's text, and the events that say how.

The id of an item begins like that of its response, but for what is before the underscore: so a reference to the item
tells where it is kept."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from router.tool_parsers import CallArguments, CallStart, Content, Part, Thought

Event = dict[str, Any]
"""Without its sequence number."""


RESPONSE = "resp_"
_ID_CHARS = 32
"""Of a response's id, behind the underscore."""


def draw_response_id() -> str:
    return f"{RESPONSE}{uuid.uuid4().hex}"


def response_of(item_id: str) -> str:
    """The id of the response that has the item."""
    return RESPONSE + item_id.partition("_")[2][:_ID_CHARS]


class _Item:
    """An output item. `content` is the item as far as it has come."""

    def __init__(self, prefix: str, response_id: str, index: int, **fields: Any) -> None:
        own_id = f"{prefix}_{response_id.removeprefix(RESPONSE)}{index}"
        self.content: dict[str, Any] = {"id": own_id, "status": "in_progress", **fields}
        self._where = {"item_id": self.content["id"], "output_index": index}
        self._index = index

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self._copy()}

    def end(self, status: str) -> Iterator[Event]:
        self.content["status"] = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self._copy()}

    def _copy(self) -> dict[str, Any]:
        """The item goes on changing after an event that shows it."""
        return dict(self.content)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", **self._where, **fields}


class _TextItem(_Item):
    """An item with one part of text. `kind` is that of its events."""

    def __init__(
        self, prefix: str, response_id: str, index: int, kind: str, part: dict[str, Any], **fields: Any
    ) -> None:
        super().__init__(prefix, response_id, index, **fields, content=[])
        self._kind = kind
        self._part = part
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield self._event("content_part.added", content_index=0, part=dict(self._part))

    def write(self, text: str, **more: Any) -> Iterator[Event]:
        self._texts.append(text)
        yield self._event(f"{self._kind}.delta", content_index=0, delta=text, **more)

    def end(self, status: str, **more: Any) -> Iterator[Event]:
        text = "".join(self._texts)
        part = {**self._part, "text": text, **more}
        self.content["content"] = [part]
        yield self._event(f"{self._kind}.done", content_index=0, text=text, **more)
        yield self._event("content_part.done", content_index=0, part=part)
        yield from super().end(status)


class _ReasoningItem(_TextItem):
    def __init__(self, response_id: str, index: int) -> None:
        part = {"type": "reasoning_text", "text": ""}
        super().__init__("rs", response_id, index, "reasoning_text", part, type="reasoning", summary=[])


class _MessageItem(_TextItem):
    """`logprobs` are of the tokens of its text, and empty if they were not asked for."""

    def __init__(self, response_id: str, index: int) -> None:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        super().__init__("msg", response_id, index, "output_text", part, type="message", role="assistant")
        self._logprobs: list[dict[str, Any]] = []

    def write(self, text: str, **more: Any) -> Iterator[Event]:
        self.add_logprobs(more["logprobs"])
        return super().write(text, **more)

    def end(self, status: str, **more: Any) -> Iterator[Event]:
        return super().end(status, logprobs=self._logprobs)

    def add_logprobs(self, logprobs: list[dict[str, Any]]) -> None:
        self._logprobs += logprobs


class _CallItem(_Item):
    prefix: ClassVar = "fc"
    kind: ClassVar = "function_call"
    text: ClassVar = "arguments"
    """The field for what comes."""
    events: ClassVar = "function_call_arguments"
    told: ClassVar[tuple[str, ...]] = ("name", "arguments")
    """Fields in the last event."""

    def __init__(self, response_id: str, index: int, call: CallStart, named: Mapping[str, str]) -> None:
        super().__init__(self.prefix, response_id, index, type=self.kind, call_id=call.id, **named, **{self.text: ""})
        self._texts: list[str] = []

    def write(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        yield self._event(f"{self.events}.delta", delta=text)

    def end(self, status: str) -> Iterator[Event]:
        self.content[self.text] = "".join(self._texts)
        yield self._event(f"{self.events}.done", **{name: self.content[name] for name in self.told})
        yield from super().end(status)


class _CustomCallItem(_CallItem):
    prefix = "ctc"
    kind = "custom_tool_call"
    text = "input"
    events = "custom_tool_call_input"
    told = ("input",)


class Output:
    """`read` what comes, then `end`; each gives events. At most one item is open, the last one. `namespaces`: for each
    tool in one its `name` and `namespace`, by its name in chats."""

    def __init__(self, response_id: str, namespaces: Mapping[str, Mapping[str, str]]) -> None:
        self._response_id = response_id
        self._namespaces = namespaces
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens that have shown nothing yet

    @property
    def items(self) -> list[dict[str, Any]]:
        return [item.content for item in self._items]

    def read(self, parts: Sequence[Part], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """`logprobs` are of the tokens that brought these parts. They are of what comes first."""
        self._logprobs += logprobs
        for part in parts:
            yield from self._write(part)

    def end(self, status: str) -> Iterator[Event]:
        """`status`: of the response, and so of the item that was being written."""
        if not self._items:
            yield from self._begin(_MessageItem(self._response_id, 0))
        if isinstance(self._open, _MessageItem):
            self._open.add_logprobs(self._take_logprobs())
        yield from self._close(status)

    def _write_reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _ReasoningItem):
            yield from self._begin(_ReasoningItem(self._response_id, len(self._items)))
        assert isinstance(self._open, _ReasoningItem)
        yield from self._open.write(text)
        self._take_logprobs()

    def _write(self, part: Part) -> Iterator[Event]:
        match part:
            case Thought(text):
                yield from self._write_reasoning(text)
            case Content(text):
                if not isinstance(self._open, _MessageItem):
                    yield from self._begin(_MessageItem(self._response_id, len(self._items)))
                assert isinstance(self._open, _MessageItem)
                yield from self._open.write(text, logprobs=self._take_logprobs())
            case CallStart():
                named = self._namespaces.get(part.name) or {"name": part.name}
                kind = _CustomCallItem if part.is_custom else _CallItem
                yield from self._begin(kind(self._response_id, len(self._items), part, named))
                self._take_logprobs()
            case CallArguments(_, text):
                assert isinstance(self._open, _CallItem)  # a call's arguments follow its start
                yield from self._open.write(text)
                self._take_logprobs()

    def _begin(self, item: _Item) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        self._items.append(item)
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Event]:
        item, self._open = self._open, None
        if item is not None:
            yield from item.end(status)

    def _take_logprobs(self) -> list[dict[str, Any]]:
        taken, self._logprobs = self._logprobs, []
        return taken
