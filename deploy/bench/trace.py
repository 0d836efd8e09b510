"""Traces in the format of those that Mooncake published: one JSON object per line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2353, 2354]}

timestamp: milliseconds. hash_ids: one for each block of 512 tokens of the prompt, the last of which may be shorter; two
prompts that begin with the same ids begin with the same tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. Raises ValueError for one that cannot be."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.timestamp < math.inf or self.input_length < 1 or self.output_length < 1:
            raise ValueError("timestamp must be 0 or more and finite, input_length and output_length 1 or more")
        if len(self.hash_ids) != -(-self.input_length // BLOCK_TOKENS):
            needed = -(-self.input_length // BLOCK_TOKENS)
            raise ValueError(
                f"hash_ids must be {needed} for input_length {self.input_length}, not {len(self.hash_ids)}"
            )

    def to_json(self) -> str:
        stated = asdict(self)
        stated["timestamp"] = round(self.timestamp, 3)
        return json.dumps(stated)


def read_trace(path: Path) -> list[Entry]:
    """In order of arrival. Raises ValueError, naming the line."""
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entries.append(_parse(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {reason}") from None
    if not entries:
        raise ValueError(f"{path}: no request in it")
    return sorted(entries, key=lambda entry: entry.timestamp)


def write_trace(path: Path, entries: Iterable[Entry]) -> None:
    path.write_text("".join(f"{entry.to_json()}\n" for entry in entries), encoding="utf-8")


def _parse(stated: object) -> Entry:
    if not isinstance(stated, dict):
        raise ValueError("must be an object")
    hash_ids = stated["hash_ids"]
    if not isinstance(hash_ids, list) or not all(isinstance(number, int) for number in hash_ids):
        raise ValueError("hash_ids must be a list of integers")
    lengths = (stated["input_length"], stated["output_length"])
    if not all(isinstance(length, int) and not isinstance(length, bool) for length in lengths):
        raise ValueError("input_length and output_length must be integers")
    return Entry(float(stated["timestamp"]), *lengths, tuple(hash_ids))


class TraceTokens:
    """Makes the prompts of a trace: the tokens of a block are a function of its id."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def prompt(self, entry: Entry) -> tuple[int, ...]:
        tokens: list[int] = []
        for hash_id in entry.hash_ids:
            tokens += Random(hash_id).choices(range(self._vocab_size), k=BLOCK_TOKENS)
        return tuple(tokens[: entry.input_length])
