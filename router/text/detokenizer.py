"""Turns token ids into text, token by token: all pieces, `flush` included, add up to `decode` of all ids."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One sample's text as it grows."""

    def add(self, token_id: int) -> str:
        """The text that is certain after this token: often all of the token's own, nothing in mid-character."""
        ...

    def flush(self) -> str:
        """The text that was held back. Called once, after the last token."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: tokens are bytes, and only an incomplete character waits. `whole_texts`: those of
    tokens that are whole characters, shared by the detokenizers of a tokenizer."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], skipped: frozenset[int], whole_texts: MutableMapping[int, str]
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._whole_texts = whole_texts
        self._utf8 = _Utf8Decoder("replace")
        self._in_character = False

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if self._in_character:
            text = self._utf8.decode(self._token_bytes(token_id))
            self._in_character = bool(self._utf8.getstate()[0])
            return text
        text_or_none = self._whole_texts.get(token_id)
        return self._first(token_id) if text_or_none is None else text_or_none

    def _first(self, token_id: int) -> str:
        """The text of a token that does not continue a character. It is remembered if it does not begin one either."""
        text = self._utf8.decode(self._token_bytes(token_id))
        self._in_character = bool(self._utf8.getstate()[0])
        if not self._in_character:
            self._whole_texts[token_id] = text
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True) if self._in_character else ""


class WindowDetokenizer:
    """For all other vocabularies, where tokens depend on neighbours (a leading space is dropped only at the start).

    Decodes a window of recent tokens with and without the new ones and takes the difference, as
    text-generation-inference's `decode_token` does. Raw byte tokens wait for the end of their run, since one bad
    byte makes the whole run unreadable. Tokens without a text of their own, `is_skipped`, are no neighbours.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_raw_byte: Callable[[int], bool],
        is_skipped: Callable[[int], bool],
        context: list[int],
    ) -> None:
        """context: tokens of the prompt that come before."""
        self._decode = decode
        self._is_raw_byte = is_raw_byte
        self._is_skipped = is_skipped
        self._context = context  # tokens whose text is out, kept because the next ones depend on them
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        if self._is_skipped(token_id):
            return ""
        out = self.flush() if self._ends_raw_run(token_id) else ""
        self._pending.append(token_id)
        if self._is_raw_byte(token_id) or self._new_text().endswith(REPLACEMENT):
            return out
        return out + self.flush()

    def flush(self) -> str:
        text = self._new_text()
        if self._pending:
            self._context, self._pending = self._pending, []
        return text

    def _ends_raw_run(self, token_id: int) -> bool:
        return bool(self._pending) and self._is_raw_byte(self._pending[-1]) and not self._is_raw_byte(token_id)

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]


class JoiningDetokenizer:
    """Leaves out the space that another detokenizer has between two added tokens, as vLLM does. added: their texts."""

    def __init__(self, inner: Detokenizer, added: Mapping[int, str]) -> None:
        self._inner = inner
        self._added = added
        self._after_added = False

    def add(self, token_id: int) -> str:
        piece, text = self._inner.add(token_id), self._added.get(token_id)
        joins, self._after_added = self._after_added and text is not None, text is not None
        return text if joins and text is not None else piece

    def flush(self) -> str:
        return self._inner.flush()
