"""One sample's tokens, turned into the text that its client reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.messages import TokenLogprobs
from baton.sampling import FinishReason
from router.text.detokenizer import Detokenizer
from router.text.prompt_logprobs import ScoredPrompt
from router.text.stops import StopScanner


class Delta(NamedTuple):
    """The new part of answer `index`. `logprobs`: one per token id, or none at all.

    `finish_reason` is set on an answer's last delta; `stop` is the stop string or the token of `stop_token_ids` that
    ended it. `prompt`: what was asked for of the prompt, in an answer's first delta.
    """

    index: int  # type: ignore[assignment]  # hides a tuple's method
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    prompt: ScoredPrompt | None = None


def join(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one answer, as one."""
    if len(deltas) == 1:
        return deltas[0]
    return deltas[-1]._replace(
        prompt=deltas[0].prompt,
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple([token_id for delta in deltas for token_id in delta.token_ids]),
        logprobs=tuple([entry for delta in deltas for entry in delta.logprobs]),
    )


class NoAnswer:
    """In place of an answer that nobody wants: the request is about its prompt. Its one token is dropped."""

    num_tokens = 0

    def __init__(self, index: int) -> None:
        self.index = index
        self.ended = False

    def add(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        return Delta(self.index, "")

    def end(self, reason: FinishReason, stop_token_id: int | None) -> Delta:
        self.ended = True
        return Delta(self.index, "", finish_reason=FinishReason.LENGTH)


class Answer:
    """Detokenizes, and looks for stop strings. Tokens past a stop string are neither delivered nor counted.

    The token that ends an answer (EOS, or one of `stop_token_ids`) counts but is not part of the text, unless
    `include_stop`; so the text of a token in `ending_ids` waits until it is known whether it was the last.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        scanner: StopScanner,
        ending_ids: frozenset[int],
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.ended = False
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._scans = bool(scanner)
        self._ending_ids = ending_ids
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._waiting: int | None = None  # a token that may have been the end

    def add(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        """The next tokens. Ends the answer when a stop string is found in their text."""
        if len(token_ids) == 1 and not self._scans and self._waiting is None and token_ids[0] not in self._ending_ids:
            self.num_tokens += 1  # what `_take` does in this most frequent case
            return Delta(self.index, self._detokenizer.add(token_ids[0]), token_ids, logprobs)
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            piece, stop = self._take(token_id)
            text += piece
            if stop is not None:
                self.ended = True
                return Delta(self.index, text, token_ids[:count], logprobs[:count], FinishReason.STOP, stop)
        return Delta(self.index, text, token_ids, logprobs)

    def end(self, reason: FinishReason, stop_token_id: int | None) -> Delta:
        """The node says that the sample ended by itself. Returns what was held back."""
        self.ended = True
        piece = ""
        if self._waiting is not None and (self._include_stop or reason is not FinishReason.STOP):
            piece = self._detokenizer.add(self._waiting)
        scan = self._scanner.add(piece + self._detokenizer.flush(), self._may_stop)
        if scan.stop is not None:
            return Delta(self.index, scan.text, finish_reason=FinishReason.STOP, stop=scan.stop)
        return Delta(self.index, scan.text + self._scanner.flush(), finish_reason=reason, stop=stop_token_id)

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens > self._min_tokens

    def _take(self, token_id: int) -> tuple[str, str | None]:
        """The text that may go out after this token, and the stop string found in it."""
        text, self._waiting = self._waiting_text(), None
        self.num_tokens += 1
        if token_id in self._ending_ids:
            self._waiting = token_id
        else:
            text += self._detokenizer.add(token_id)
        if not self._scans:
            return text, None
        scan = self._scanner.add(text, self._may_stop)
        return scan.text, scan.stop

    def _waiting_text(self) -> str:
        return "" if self._waiting is None else self._detokenizer.add(self._waiting)
