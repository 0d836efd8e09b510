"""Encodes samples as token ids, with a code for each token's weight in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from transformers import PreTrainedTokenizerFast

from tools import tiny_tasks as tasks
from tools.tiny.tasks.grammar import PIECE
from tools.tiny.training.tokenizer import BOS, EOT, IM_END, IM_START


class Codec:
    """Encodes text at about a million tokens a second, by caching every piece it has seen.

    The tokenizer never merges across the boundaries of its pre-tokenizer, so encoding the pieces one by one gives the
    ids of the whole text; `verify` checks this.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The token ids of ASCII `text`, without special tokens."""
        ids: list[int] = []
        known = self._pieces
        for piece in PIECE.findall(text):
            found = known.get(piece)
            if found is None:
                found = known[piece] = self._tokenizer.encode(piece, add_special_tokens=False)
            ids += found
        return ids

    def message(self, message: tasks.Message) -> tuple[list[int], list[int]]:
        """One chat message as the template writes it: what comes before its content, and the content to <|im_end|>."""
        header = [IM_START, *self.encode(message["role"]), *self.encode("\n")]
        return header, [*self.encode(message["content"]), IM_END]

    def verify(self, seed: int) -> None:
        """Raise if a chat encoded here differs from what the tokenizer's own template gives."""
        for index in range(20):
            chat = tasks.task_chat(Random(seed + index), 300)
            ids, _ = encode_chat(self, chat, 10**9, 1)
            want = self._tokenizer.apply_chat_template(chat, return_dict=False)
            if ids != list(want)[: len(ids)] or len(want) - len(ids) > 1:
                raise RuntimeError("the codec and the tokenizer's chat template disagree")


def encode_chat(codec: Codec, chat: Sequence[tasks.Message], limit: int, weight: int) -> tuple[list[int], list[int]]:
    """The ids and codes of as many complete exchanges of `chat` as fit into `limit` tokens (possibly none)."""
    ids, codes, kept = [BOS], [1], 0
    newline = codec.encode("\n")
    for message in chat:
        header, content = codec.message(message)
        answer = message["role"] == "assistant"
        ids += header + content
        codes += [1] * len(header) + [1 + weight if answer else 1] * len(content)
        if len(ids) > limit:
            break
        if answer:
            kept = len(ids)
        ids += newline
        codes += [1] * len(newline)
    return ids[:kept], codes[:kept]


def encode_sample(codec: Codec, sample: tasks.Sample) -> tuple[list[int], list[int]]:
    """The ids of a whole sample, with codes that count only its last answer as an answer."""
    if not sample.plain:
        turns = [*sample.messages, {"role": "assistant", "content": sample.answer}]
        chat = tasks.flatten(turns, sample.tools)
        ids, _ = encode_chat(codec, chat, 10**9, 1)
        num_answer = len(codec.encode(sample.answer)) + 1
    else:
        answer = [*codec.encode(sample.answer), EOT]
        ids, num_answer = [BOS, *codec.encode(sample.prompt), *answer], len(answer)
    return ids, [1] * (len(ids) - num_answer) + [2] * num_answer
