"""What callers get, in vLLM's form, and how it grows from the pieces of a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.messages import TokenLogprobs
from baton_llm.prompts import Encoded
from router.text.answer import Delta
from router.text.prompt_logprobs import ScoredPrompt


@dataclass(frozen=True, slots=True)
class Logprob:
    """`rank`: 1 for the most likely token; None for a chosen one that is not among those asked for. `decoded_token`:
    None from a router, which sends ids."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer so far. `logprobs` has a dict for each token, by token id, the chosen one first; it and
    `cumulative_logprob` are None unless asked for. `finish_reason`: "stop", "length", or None while it goes on.
    `stop_reason`: the stop text or the token of `stop_token_ids` that ended it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt. `prompt`: None where token ids were given. `num_cached_tokens`: prompt tokens that did
    not have to be computed, known at the end. `prompt_logprobs`, if asked for and known: a dict for each token of the
    prompt, by token id, the token itself first; None for the first token, which has none."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def news(output: RequestOutput, before: RequestOutput | None) -> RequestOutput:
    """What `output` has more than the one `before`, as vLLM's DELTA outputs: answers with something new, of which
    `cumulative_logprob` counts all tokens. The prompt's logprobs are in the first output that has them; later ones have
    an empty list."""
    if before is None:
        return output
    known = before.prompt_logprobs is not None
    return dataclasses.replace(
        output,
        outputs=[_news(a, b) for a, b in zip(output.outputs, before.outputs, strict=True) if a != b],
        prompt_logprobs=[] if known else output.prompt_logprobs,
    )


def _news(answer: CompletionOutput, before: CompletionOutput) -> CompletionOutput:
    num_known = len(before.token_ids)
    return dataclasses.replace(
        answer,
        text=answer.text[len(before.text) :],
        token_ids=answer.token_ids[num_known:],
        logprobs=None if answer.logprobs is None else answer.logprobs[num_known:],
    )


TokenText = Callable[[int], str | None]


class Collector:
    """Adds up the pieces of one prompt's answers. `with_text`: False: without texts, also of single tokens.
    `with_ranks`: whether the logprobs are those of the most likely tokens."""

    def __init__(
        self,
        request_id: str,
        prompt: Encoded,
        n: int,
        with_logprobs: bool,
        token_text: TokenText,
        with_text: bool = True,
        with_ranks: bool = True,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._token_text = token_text = token_text if with_text else _no_text
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._answers = [_Answer(index, with_logprobs, token_text, with_text, with_ranks) for index in range(n)]

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.prompt is not None and self._prompt_logprobs is None:
                self._prompt_logprobs = _of_prompt(delta.prompt, self._token_text)
            self._answers[delta.index].add(delta)

    @property
    def all_ended(self) -> bool:
        return all(answer.finish_reason for answer in self._answers)

    def output(self, finished: bool, num_cached_tokens: int | None = None) -> RequestOutput:
        """What there is so far; later pieces do not change it."""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=[answer.output() for answer in self._answers],
            finished=finished,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )


class _Answer:
    def __init__(
        self, index: int, with_logprobs: bool, token_text: TokenText, with_text: bool, with_ranks: bool
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._index = index
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] | None = [] if with_logprobs else None
        self._cumulative = 0.0
        self._stop: int | str | None = None
        self._token_text = token_text
        self._with_text = with_text
        self._with_ranks = with_ranks

    def add(self, delta: Delta) -> None:
        if self._with_text:
            self._text += delta.text
        self.token_ids += delta.token_ids
        if self._logprobs is not None:
            for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True):
                self._cumulative += entry.logprob
                self._logprobs.append(_by_token(token_id, entry, self._token_text, self._with_ranks))
        if delta.finish_reason:
            self.finish_reason, self._stop = delta.finish_reason.value, delta.stop

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=list(self.token_ids),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop,
        )


def _no_text(_token_id: int) -> None:
    return None


def _by_token(chosen: int, entry: TokenLogprobs, token_text: TokenText, with_ranks: bool) -> dict[int, Logprob]:
    ranked = enumerate(entry.top, 1)
    top = {token: Logprob(value, rank if with_ranks else None, token_text(token)) for rank, (token, value) in ranked}
    return {chosen: top.pop(chosen, Logprob(entry.logprob, None, token_text(chosen))), **top}


def _of_prompt(prompt: ScoredPrompt, token_text: TokenText) -> list[dict[int, Logprob] | None]:
    entries: list[dict[int, Logprob] | None] = []
    for token_id, score in prompt.scores():
        if score is None:
            entries.append(None)
            continue
        own = {token_id: Logprob(score.logprob, score.rank, token_text(token_id))}
        top = {other: Logprob(value, rank, token_text(other)) for rank, (other, value) in enumerate(score.top, 1)}
        entries.append({**own, **top} | own)
    return entries
