"""Turns text into token ids and back, with the same `tokenizer.json` that the nodes serve.

Thread-safe. `encode_batch_fast` and `decode_batch` release the interpreter's lock while they work; the functions for
one text do not (tokenizers 0.23: 500 KB stop all other threads for 0.5 s, as a batch of one for 5 ms). `encode` also
looks up the place of each token in the text, which is a quarter of its time. The library's own threads are turned off:
batches of one gain nothing from them, and a short text would wait there for a long one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

import tokenizers

from baton.errors import NodeUnavailable
from router.text.detokenizer import ByteDetokenizer, Detokenizer, JoiningDetokenizer, WindowDetokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # read by the library at each call

_MOST_SKIPPED = 24
"""So many tokens without text may come between the text of a prompt and its answer."""


TruncationSide = Literal["left", "right"]


def truncated(tokens: tuple[int, ...], most: int, side: TruncationSide) -> tuple[int, ...]:
    """The last `most` tokens, or the first if the right side is truncated."""
    return tokens[-most:] if side == "left" else tokens[:most]


class Tokenizer:
    """A `tokenizer.json`. `data` is its content; nodes announce it by its `digest` (sha256, hex)."""

    def __init__(self, data: bytes) -> None:
        self.digest = hashlib.sha256(data).hexdigest()
        self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._skipped = frozenset(i for i, t in added.items() if t.special)
        self._added = {i: t.content for i, t in added.items()}
        decoder = json.loads(data).get("decoder")
        self._byte_level = _is_byte_level(decoder)
        self._whole_texts: dict[int, str] = {}
        self._byte_fallback = not self._byte_level and "ByteFallback" in _kinds(decoder)

    def to_json(self) -> str:
        """An equal `tokenizer.json`."""
        return self._tokenizer.to_str()

    def encode(
        self, text: str, add_special_tokens: bool, most: int | None = None, truncation_side: TruncationSide = "left"
    ) -> tuple[int, ...]:
        """Token ids of a text; of more than `most` tokens the last ones, beside the special tokens around them. With
        "right" as the side that is truncated, the first ones."""
        if most is None:
            return tuple(self._encode(text, add_special_tokens).ids)
        content = self._encode(text, False)
        num_special = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        content.truncate(max(most - num_special, 0), direction=truncation_side)
        ids = self._tokenizer.post_process(content, None, add_special_tokens).ids
        return truncated(tuple(ids), most, truncation_side)

    def count(self, text: str) -> int:
        """The number of the text's tokens, without special ones."""
        return len(self._encode(text, False))

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        [text] = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def added_tokens(self) -> dict[str, dict[str, Any]]:
        """By id, in the form of `added_tokens_decoder` in a tokenizer_config.json."""
        names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        added = self._tokenizer.get_added_tokens_decoder()
        return {str(i): {name: getattr(token, name) for name in names} for i, token in sorted(added.items())}

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> Detokenizer:
        """A fresh one, for one sample, whose text goes on from that of the `prompt`, as in vLLM: after a word, its
        first token has its space. Spaces between special tokens matter only where these are not skipped, and where
        the vocabulary is not byte-level: there, tokens have no others than their own."""
        skipped = self._skipped if skip_special_tokens else frozenset()
        if self._byte_level:
            return ByteDetokenizer(self.token_bytes, skipped, self._whole_texts)
        is_skipped = functools.partial(self._has_no_text, skipped)
        last = reversed(prompt[-_MOST_SKIPPED:])
        context = next(([token] for token in last if not is_skipped(token) and not self._is_raw_byte(token)), [])
        window = WindowDetokenizer(self._decode_all, self._is_raw_byte, is_skipped, context)
        if skip_special_tokens or spaces_between_special_tokens:
            return window
        return JoiningDetokenizer(window, self._added)

    @functools.lru_cache(maxsize=2**18)  # noqa: B019  (a tokenizer lives as long as the process)
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for, after others; none for an id without a token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_of_char()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
            return str(token).encode()
        if self._is_raw_byte(token_id):
            return bytes((int(token[3:5], 16),))
        return self._decode_all([token_id, token_id])[len(self._decode_all([token_id])) :].encode()

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids, skip_special_tokens=False)

    def _has_no_text(self, skipped: frozenset[int], token_id: int) -> bool:
        """Models may have more ids than their vocabularies have tokens."""
        return token_id in skipped or self._tokenizer.id_to_token(token_id) is None

    def _is_raw_byte(self, token_id: int) -> bool:
        """Whether it is one of the `<0x00>` .. `<0xFF>` tokens that spell out what the vocabulary lacks."""
        if not self._byte_fallback:
            return False
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def check_digest(data: bytes, digest: str, node: str) -> None:
    """Raises NodeUnavailable unless `data`, fetched from `node`, is the tokenizer that it announced."""
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise NodeUnavailable(f"tokenizer of {node} has digest {found[:12]}, not the announced {digest[:12]}")


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    """The kinds of a decoder and of its parts."""
    if not decoder:
        return []
    return [decoder["type"], *(kind for part in decoder.get("decoders", ()) for kind in _kinds(part))]


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether each token is a string of bytes on its own, so that the text is their sum."""
    return set(_kinds(decoder)) - {"Sequence", "Fuse"} == {"ByteLevel"}


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones stand for themselves, the
    others follow from U+0100 on (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
