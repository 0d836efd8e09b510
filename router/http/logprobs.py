"""Logprobs with the tokens' texts, in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from baton.messages import TokenLogprobs
from baton.prompt_logprobs import PromptTokenLogprob
from router.text.answer import Delta
from router.text.prompt_logprobs import ScoredPrompt
from router.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot express (as in vLLM), nor NaN, which a model's overflow may give."""


def shown(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST


def _continues_character(byte: int) -> bool:
    return byte & 0xC0 == 0x80  # in UTF-8


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text. A token that is not text by itself becomes `bytes:` and its bytes, as in OpenAI's API."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _token_name(tokenizer: Tokenizer, token_id: int, as_id: bool) -> str:
    """What stands for the token among logprobs. as_id: vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}" if as_id else token_text(tokenizer, token_id)


PromptShape = Callable[[ScoredPrompt], list[dict[str, Any] | None]]


def prompt_shape(tokenizer: Tokenizer, num_top: int | None) -> PromptShape | None:
    """What gives a prompt's logprobs in vLLM's form: for each token a dict by token id, in which the token itself comes
    first; null for the first token. None: not wanted."""
    if num_top is None:
        return None

    def entry(logprob: float, rank: int, token_id: int) -> dict[str, Any]:
        return {"logprob": shown(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}

    def described(token_id: int, score: PromptTokenLogprob) -> dict[str, Any]:
        own = {str(token_id): entry(score.logprob, score.rank, token_id)}
        top = enumerate(score.top[:num_top], 1)
        others = {str(other): entry(value, rank, other) for rank, (other, value) in top if other != token_id}
        return own | others

    return lambda prompt: [score and described(token_id, score) for token_id, score in prompt.scores()]


class ChatLogprobs:
    """`as_ids`: with ids for the names of tokens, which are unique."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def of(self, delta: Delta) -> dict[str, Any]:
        pairs = zip(delta.token_ids, delta.logprobs, strict=True)
        return {"content": [self._token(token_id, entry) for token_id, entry in pairs], "refusal": None}

    def _token(self, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._described(other, logprob) for other, logprob in entry.top]
        return {**self._described(token_id, entry.logprob), "top_logprobs": top}

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        name, data = _token_name(self._tokenizer, token_id, self._as_ids), self._tokenizer.token_bytes(token_id)
        return {"token": name, "logprob": shown(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """The older form, whose `text_offset` counts characters from the answer's start: those of the text, and as in vLLM
    of the names of special tokens, even where the text leaves them out. `as_ids`: as in ChatLogprobs. `num_echoed`: an
    answer begins with its prompt, whose tokens have so many of the most likely ones; None: it does not."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False, num_echoed: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._num_echoed = num_echoed
        self._offsets: dict[int, int] = {}  # answer -> characters so far
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}  # answer -> what counts them

    def of(self, delta: Delta) -> dict[str, Any]:
        scored = [*self._echoed(delta), *zip(delta.token_ids, delta.logprobs, strict=True)]
        names = [_token_name(self._tokenizer, token_id, self._as_ids) for token_id, _ in scored]
        entries = [entry for _, entry in scored]
        return {
            "tokens": names,
            "token_logprobs": [entry and shown(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(name, entry) for name, entry in zip(names, entries, strict=True)],
            "text_offset": self._advance(delta.index, [token_id for token_id, _ in scored]),
        }

    def _echoed(self, delta: Delta) -> list[tuple[int, TokenLogprobs | None]]:
        """The prompt's tokens; the first has no logprob."""
        if self._num_echoed is None or delta.prompt is None:
            return []
        return [
            (token_id, score and TokenLogprobs(score.logprob, score.top[: self._num_echoed]))
            for token_id, score in delta.prompt.scores()
        ]

    def _top(self, chosen: str, entry: TokenLogprobs) -> dict[str, float]:
        top = {_token_name(self._tokenizer, token_id, self._as_ids): shown(logprob) for token_id, logprob in entry.top}
        return {**top, chosen: shown(entry.logprob)}

    def _advance(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Where the text of each token begins: of several that are one character, where that does."""
        decoder = self._decoders.setdefault(index, _Utf8Decoder("replace"))
        offset = self._offsets.get(index, 0)
        offsets = []
        for token_id in token_ids:
            data = self._tokenizer.token_bytes(token_id)
            if data and not _continues_character(data[0]):  # a character that stays incomplete was before this token
                offset += len(decoder.decode(b"", final=True))
            offsets.append(offset)
            offset += len(decoder.decode(data))
        self._offsets[index] = offset
        return offsets
