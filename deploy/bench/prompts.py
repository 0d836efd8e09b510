"""Prompts of a trace as text, for servers whose tokenizer is unknown.

Each word is short and common, one token with most vocabularies; the report has what the server counted.
"""

from __future__ import annotations

from random import Random

from deploy.bench.trace import BLOCK_TOKENS, Entry

_TEXT = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not "
    "but what all were when we there can an your which their said if do will each about how up out them "
    "then she many some so these would other into has more her two like him see time could no make than "
    "first been its now people my made over did down only way find use may water long little very after "
    "words called just where most know get through back much "
)
_WORDS = tuple(_TEXT.split())


class PromptTexts:
    """The words of a block are a function of its id and `seed`; prompts that share first blocks share first words."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._blocks: dict[int, list[str]] = {}

    def text(self, entry: Entry) -> str:
        words: list[str] = []
        for hash_id in entry.hash_ids:
            words += self._block(hash_id)
        return " ".join(words[: entry.input_length])

    def _block(self, hash_id: int) -> list[str]:
        if hash_id not in self._blocks:
            self._blocks[hash_id] = Random(f"{self._seed} {hash_id}").choices(_WORDS, k=BLOCK_TOKENS)
        return self._blocks[hash_id]
