"""What an answer is made of in SGLang's form, and whole answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.prompt_logprobs import PromptTokenLogprob
from baton.sampling import FinishReason
from router.generation import Generation, Part
from router.http.logprobs import shown
from router.http.responses import Whole
from router.http.sglang.schemas import Scores, SglangRequest
from router.text.answer import Delta, join
from router.text.models import ServedModel
from router.text.prompt_logprobs import ScoredPrompt

Lists = dict[str, list[Any]]


class SglangShape:
    """`ids[i]`: of answer i."""

    reads_pieces = False

    def __init__(self, model: ServedModel, body: SglangRequest, ids: Sequence[str]) -> None:
        self.is_batch = body.is_batch
        self.num_samples = body.num_samples
        self._tells_prompt = bool(body.return_prompt_token_ids)
        self._scores = [one.scores for one in body.each]
        self._with_text = bool(body.return_text_in_logprobs)
        self._model = model
        self._ids = ids

    def whole(self, generation: Generation, answers: Sequence[Sequence[Delta]]) -> Whole:
        found = [self._answer(generation, join(deltas)) for deltas in answers]
        return found if self.is_batch else found[0]

    def part_of(self, generation: Generation, index: int) -> Part:
        """The prompt that the answer is to."""
        return generation.parts[index // self.num_samples]

    def prompt(self, part: Part) -> dict[str, Any]:
        """What is beside an answer of its prompt."""
        return {"prompt_token_ids": list(part.request.prompt_tokens)} if self._tells_prompt else {}

    def meta(self, generation: Generation, last: Delta, num_tokens: int, last_token: int | None) -> dict[str, Any]:
        """`meta_info` without its lists, of an answer that has come to `last` and has `num_tokens`."""
        part = self.part_of(generation, last.index)
        timings = part.timings if generation.tells_timings else None
        meta = {
            "id": self._ids[last.index],
            "finish_reason": _finish(last, num_tokens, last_token),
            "prompt_tokens": len(part.request.prompt_tokens),
            "completion_tokens": num_tokens,
            "cached_tokens": timings and timings.num_cached_tokens,
            "weight_version": weight_version(self._model),
        }
        return meta if timings is None else {**meta, "e2e_latency": timings.total_s}

    def lists(self, delta: Delta) -> Lists:
        """What it adds to the lists of `meta_info`, by name."""
        scores = self._scores[delta.index // self.num_samples]
        if scores is None:
            return {}
        pairs = list(zip(delta.token_ids, delta.logprobs, strict=True))
        prompt = list(_scored(delta.prompt, scores.start)) if delta.prompt is not None and scores.start >= 0 else []
        lists: Lists = {
            "input_token_logprobs": [self._entry(token, score and score.logprob) for token, score in prompt],
            "output_token_logprobs": [self._entry(token, entry.logprob) for token, entry in pairs],
        }
        for kind in _further(scores):
            lists[f"input_{kind}"] = [score and self._entries(score.top[: scores.num_top]) for _, score in prompt]
            lists[f"output_{kind}"] = [self._entries(entry.top) for _, entry in pairs]
        return lists

    def _answer(self, generation: Generation, answer: Delta) -> dict[str, Any]:
        last_token = answer.token_ids[-1] if answer.token_ids else None
        meta = self.meta(generation, answer, len(answer.token_ids), last_token)
        return {
            "text": answer.text,
            "output_ids": list(answer.token_ids),
            "meta_info": {**meta, **self.lists(answer)},
            **self.prompt(self.part_of(generation, answer.index)),
        }

    def _entries(self, top: Sequence[tuple[int, float]]) -> list[list[Any]]:
        return [self._entry(token, logprob) for token, logprob in top]

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        text = None
        if self._with_text:
            text = self._model.tokenizer.token_bytes(token).decode(errors="replace")
        return [None if logprob is None else shown(logprob), token, text]


def weight_version(model: ServedModel) -> str:
    """Equal for nodes between which a request may go on."""
    return "default" if model.version is None else model.version.id


def _further(scores: Scores) -> Iterator[str]:
    """The kinds of lists beside those of the tokens themselves."""
    if scores.num_top:
        yield "top_logprobs"
    if scores.named:
        yield "token_ids_logprobs"


def _scored(prompt: ScoredPrompt, start: int) -> Iterator[tuple[int, PromptTokenLogprob | None]]:
    """The prompt's tokens from `start` on; the first of them has no logprob, as with SGLang."""
    for index, (token, score) in enumerate(prompt.scores()):
        if index >= start:
            yield token, None if index == start else score


def _finish(last: Delta, num_tokens: int, last_token: int | None) -> dict[str, Any] | None:
    """`matched`: the text or the token that ended the answer, the model's end of text included."""
    match last.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens}
    return {"type": "stop", "matched": last_token if last.stop is None else last.stop}
