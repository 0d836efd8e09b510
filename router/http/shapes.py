"""What clients get: whole answers and chunks, in the forms of chats and of completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from baton.sampling import FinishReason
from router.generation import Generation, Usage
from router.http.chat_message import delta_of, has_calls, message_of
from router.http.logprobs import ChatLogprobs, CompletionLogprobs, PromptShape
from router.requests.request_state import RequestTimings
from router.text.answer import Delta, join
from router.text.answer_reader import AnswerReader, AnswerReading, parts_of
from router.text.models import ServedModel
from router.tool_parsers import Part, Thought


class Shape(Protocol):
    """One request's answer in JSON. It remembers what must be sent only once, so each request has its own.

    `only_text_changes`: from an answer's second chunk up to the one that ends it, nothing but the text is different.
    `reads_pieces`: see WholeShape.
    """

    @property
    def only_text_changes(self) -> bool: ...

    @property
    def reads_pieces(self) -> bool: ...

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """None: there is nothing to send."""
        ...

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> dict[str, Any]: ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """What has been used by what was made into chunks, or the whole."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...


class ChatShape:
    """`prompt_ids`, `prompt_text`: the prompt, if clients get the ids of tokens, or it as text. `reading` says how
    texts become messages; None: texts are their content. `echo` comes before each content. `with_reasoning`: whether
    clients get what the reading finds to be reasoning; if not, they get nothing that is about single tokens either."""

    def __init__(
        self,
        request_id: str,
        model: ServedModel,
        logprobs: ChatLogprobs | None,
        prompt_ids: Sequence[int] | None,
        reading: AnswerReading | None = None,
        echo: str = "",
        prompt_shape: PromptShape | None = None,
        with_reasoning: bool = True,
        prompt_text: str | None = None,
    ) -> None:
        self._prompt_shape = prompt_shape
        self._with_reasoning = with_reasoning
        self._head = _head(f"chatcmpl-{request_id}", model)
        tells_tokens = with_reasoning or reading is None or not reading.parts_reasoning
        self._logprobs = logprobs if tells_tokens else None
        self._prompt_ids = prompt_ids
        self._prompt_text = prompt_text
        self._tells_prompt = prompt_ids is not None or prompt_text is not None
        self._token_ids = prompt_ids is not None and tells_tokens
        self._reading = reading
        self._is_named = reading is not None and reading.is_named  # OpenAI says stop then
        self._echo = echo
        self._readers: dict[int, AnswerReader] = {}
        self._calling: set[int] = set()  # answers with tool calls
        self._begun: set[int] = set()

    @property
    def only_text_changes(self) -> bool:
        return self._reading is None and self._logprobs is None and not self._token_ids

    @property
    def reads_pieces(self) -> bool:
        return self._reading is not None and self._reading.parts_reasoning

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        content = {"content": delta.text} if self._reading is None else delta_of(self._read(self._reading, delta))
        prompt = self._prompt() if self._tells_prompt and not self._begun else {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            content = self._echoed({"role": "assistant", "content": None, **content})
        elif not (content or delta.finish_reason or self._logprobs or self._token_ids):
            return None
        choices = [self._choice(delta, {"delta": content})]
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, **prompt}

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        choices = [self._whole_choice(deltas, join(deltas)) for deltas in answers]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            # vLLM says it beside the choices of a chat, and in those of a completion
            **{name: value for name, value in choices[0].items() if name == "prompt_logprobs"},
            "usage": self.usage(generation.usage),
            **timings_of(generation.timings),
            **self._prompt(),
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        num_reasoning = self._reading.num_reasoning_tokens if self._reading else None
        details = {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
        return {**usage_of(usage), **details}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage(usage)}

    def _prompt(self) -> dict[str, Any]:
        ids = {} if self._prompt_ids is None else {"prompt_token_ids": list(self._prompt_ids)}
        return ids if self._prompt_text is None else {**ids, "prompt_text": self._prompt_text}

    def _whole_choice(self, deltas: Sequence[Delta], answer: Delta) -> dict[str, Any]:
        """answer: all of its deltas as one."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if self._reading is not None:
            pieces = deltas if self.reads_pieces else [answer]
            message = message_of([part for piece in pieces for part in self._read(self._reading, piece)])
        return self._choice(answer, {"message": self._echoed(message)})

    def _echoed(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": self._echo + (message["content"] or "")} if self._echo else message

    def _read(self, reading: AnswerReading, delta: Delta) -> Sequence[Part]:
        if delta.index not in self._readers:
            self._readers[delta.index] = reading.reader()
        parts = parts_of(self._readers[delta.index], delta)
        if has_calls(parts):
            self._calling.add(delta.index)
        return parts if self._with_reasoning else [part for part in parts if not isinstance(part, Thought)]

    def _choice(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs.of(delta) if self._logprobs else None
        choice = _choice(delta, content, logprobs, self._token_ids, self._prompt_shape)
        if delta.finish_reason is FinishReason.STOP and delta.index in self._calling and not self._is_named:
            choice["finish_reason"] = "tool_calls"
        return choice


class CompletionShape:
    """`prompt_ids[i]`: tokens of a prompt, which clients get with answer i; None: clients get no ids of tokens.
    `echoes[i]` comes before the text of answer i."""

    reads_pieces = False

    def __init__(
        self,
        request_id: str,
        model: ServedModel,
        logprobs: CompletionLogprobs | None,
        prompt_ids: Mapping[int, Sequence[int]] | None,
        echoes: Mapping[int, str],
        prompt_shape: PromptShape | None = None,
    ) -> None:
        self._prompt_shape = prompt_shape
        self._head = {**_head(f"cmpl-{request_id}", model), "object": "text_completion"}
        self._logprobs = logprobs
        self._prompt_ids = None if prompt_ids is None else dict(prompt_ids)
        self._echoes = dict(echoes)

    @property
    def only_text_changes(self) -> bool:
        return self._logprobs is None and self._prompt_ids is None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(delta)]}

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [self._choice(join(deltas)) for deltas in answers],
            "usage": usage_of(generation.usage),
            **timings_of(generation.timings),
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        return usage_of(usage)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage_of(usage)}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs.of(delta) if self._logprobs else None
        text = self._echoes.pop(delta.index, "") + delta.text
        choice = _choice(delta, {"text": text}, logprobs, self._prompt_ids is not None, self._prompt_shape)
        if self._prompt_ids and delta.index in self._prompt_ids:
            choice["prompt_token_ids"] = list(self._prompt_ids.pop(delta.index))
        return choice


def usage_of(usage: Usage) -> dict[str, Any]:
    cached = usage.num_cached_tokens
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def timings_of(timings: RequestTimings | None) -> dict[str, Any]:
    """baton's addition to the API: durations in milliseconds, and the nodes. Empty: this client is not told."""
    return {} if timings is None else {"timings": _milliseconds(timings)}


def _milliseconds(timings: RequestTimings) -> dict[str, Any]:
    return {
        "queue_ms": _ms(timings.queue_s),
        "prefill_ms": _ms(timings.prefill_s),
        "gather_ms": _ms(timings.gather_s),
        "wire_ms": _ms(timings.wire_s),
        "commit_ms": _ms(timings.commit_s),
        "transfer_ms": _ms(timings.transfer_s),
        "scatter_ms": _ms(timings.scatter_s),
        "step_wait_ms": _ms(timings.step_wait_s),
        "handoff_ms": _ms(timings.handoff_s),
        "first_token_ms": _ms(timings.first_token_s),
        "total_ms": _ms(timings.total_s),
        "cached_tokens": timings.num_cached_tokens,
        "decode_cached_tokens": timings.num_decode_cached_tokens,
        "transfer_bytes": timings.transfer_bytes,
        "attempts": timings.num_attempts,
        "moves": timings.num_moves,
        "prefill_node": timings.prefill_node,
        "decode_node": timings.decode_node,
    }


def _ms(seconds: float) -> float:
    """To the microsecond. (`round` to digits takes five times as long.)"""
    return round(seconds * 1e6) / 1e3


def _head(answer_id: str, model: ServedModel) -> dict[str, Any]:
    return {"id": answer_id, "object": "", "created": int(time.time()), "model": model.name}


def prompt_ids(generation: Generation, num_each: int) -> dict[int, Sequence[int]]:
    """The tokens of each prompt, by the first of its `num_each` answers."""
    return {i * num_each: part.request.prompt_tokens for i, part in enumerate(generation.parts)}


def _choice(
    delta: Delta,
    content: dict[str, Any],
    logprobs: dict[str, Any] | None,
    token_ids: bool,
    prompt_shape: PromptShape | None,
) -> dict[str, Any]:
    """The fields that all kinds of choice have around their content; `stop_reason`, `prompt_logprobs`
    and `token_ids` are vLLM's."""
    reason = delta.finish_reason.value if delta.finish_reason else None
    choice = {"index": delta.index, **content, "logprobs": logprobs, "finish_reason": reason, "stop_reason": delta.stop}
    if prompt_shape is not None and delta.prompt is not None:
        choice["prompt_logprobs"] = prompt_shape(delta.prompt)
    return {**choice, "token_ids": list(delta.token_ids)} if token_ids else choice
