"""A response as clients get it: whole, and as events show it from its beginning to its end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from baton.sampling import FinishReason
from router.generation import Generation, Usage
from router.http.logprobs import ChatLogprobs
from router.http.responses_api.output import Event, Output, draw_response_id
from router.http.responses_api.schemas import Format, ResponsesRequest
from router.http.shapes import timings_of
from router.text.answer import Delta
from router.text.answer_reader import AnswerReading, parts_of
from router.text.models import ServedModel

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
"""Fields of the request that the response repeats as they are."""


class ResponseShape:
    """One response, whose answer is read with `reading`; None: as it is. `stored`: whether it will be kept."""

    def __init__(
        self,
        body: ResponsesRequest,
        model: ServedModel,
        generation: Generation,
        reading: AnswerReading | None,
        stored: bool,
    ) -> None:
        self.id = draw_response_id()
        self._generation = generation
        as_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = ChatLogprobs(model.tokenizer, as_ids) if body.wants_logprobs else None
        self._reader = reading.reader() if reading else None
        self._output = Output(
            self.id,
            {
                tool.chat_name: {"name": tool.name, "namespace": tool.namespace}
                for tool in body.tools or ()
                if tool.namespace is not None
            },
        )
        self._reason: FinishReason | None = None
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            **_echo(body),
            **_taken(generation),
            "store": stored,
        }

    def read(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta; the last one's include the end of the output."""
        logprobs = self._logprobs.of(delta)["content"] if self._logprobs else []
        yield from self._output.read(parts_of(self._reader, delta), logprobs)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            yield from self._output.end(self._status)

    @property
    def reads_pieces(self) -> bool:
        return self._reader is not None

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The response with its only answer, read delta by delta: logprobs are of the text that they came with."""
        for delta in itertools.chain.from_iterable(answers):
            for _ in self.read(delta):
                pass
        return self.ended()

    def begun(self) -> dict[str, Any]:
        """The response before its first token."""
        return {
            **self._head,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def ended(self) -> dict[str, Any]:
        """The response after its last token."""
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            **self._head,
            "status": self._status,
            "completed_at": int(time.time()) if incomplete is None else None,
            "error": None,
            "incomplete_details": incomplete,
            "output": self._output.items,
            "usage": usage_of(self._generation.usage, self._reader.num_reasoning_tokens if self._reader else 0),
            **timings_of(self._generation.timings),
        }

    def cancelled(self) -> dict[str, Any]:
        """The response of a client that wants no more of it."""
        return {**self.begun(), "status": "cancelled"}

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The response of a generation that failed. `error`: with its code and message."""
        return {**self.begun(), "status": "failed", "error": error, "output": self._output.items}

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"


def usage_of(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    """A client that is not told what was cached gets a count of 0: the field cannot be absent."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _echo(body: ResponsesRequest) -> dict[str, Any]:
    """Fields that nobody knows are not repeated: they may be anything, also what JSON cannot say."""
    return {
        **{name: getattr(body, name) for name in _ECHOED},
        "background": bool(body.background),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "text": {"format": _echoed_format(body.text.format if body.text else None)},
        "tool_choice": _echoed_choice(body.tool_choice),
        "tools": [tool.echoed() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
    }


def _echoed_format(wanted: Format | None) -> dict[str, Any]:
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    return wanted.model_dump(by_alias=True, exclude_none=True, include=set(Format.model_fields))


def _echoed_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    if not isinstance(choice, dict):
        return choice or "auto"
    if choice["type"] == "allowed_tools":
        tools = [_echoed_function(one) for one in choice["tools"]]
        return {"type": choice["type"], "mode": choice["mode"], "tools": tools}
    return _echoed_function(choice)


def _echoed_function(choice: dict[str, Any]) -> dict[str, Any]:
    return {"type": choice["type"], "name": choice["name"]}


def _taken(generation: Generation) -> dict[str, Any]:
    """The sampling parameters as they are, which the model's defaults may have decided."""
    sampling = generation.parts[0].request.sampling
    return {"temperature": sampling.temperature, "top_p": sampling.top_p}
