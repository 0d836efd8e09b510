"""Slabs of rows: the content and length of rows, depending on the progress of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from tools import tiny_tasks as tasks
from tools.tiny.training.codec import Codec, encode_chat, encode_sample

# The share of training tokens in rows of each length, once the curriculum has reached that length.
LENGTH_SHARES = {64: 0.03, 128: 0.15, 256: 0.20, 512: 0.18, 1024: 0.13, 2048: 0.12, 4096: 0.19}
CURRICULUM = ((0.06, 512), (0.15, 1024), (0.28, 2048))  # (until this progress, maximum length of rows)

_SHARE_OF_TOOLS = {True: 0.4, False: 0.1}
"""Of chats with tools, in rows of up to 1,024 tokens, and in longer ones."""

LONG_ANSWER_WEIGHT = 3  # of answers in rows of 1,024 tokens or more, which have few of them


@dataclass(frozen=True)
class Slab:
    """Rows of one length, flattened: tokens and targets [rows * length] uint16, codes [rows * length] uint8.

    A code gives a target's weight: 0 for padding (none), 1 for the prompt, 1 + n for an answer of weight n.
    """

    length: int
    tokens: np.ndarray
    targets: np.ndarray
    codes: np.ndarray


def draw_chat(rng: Random, length: int) -> list[tasks.Message]:
    """A chat for a row of `length` tokens: the longer the row, the more often it is about long texts."""
    draw = rng.random()
    if rng.random() < _SHARE_OF_TOOLS[length <= 1024]:
        return _draw_tool_chat(rng, length)
    if length <= 128:
        return tasks.task_chat(rng, int(length * rng.random()))
    share_of_tasks = 0.6 if length <= 512 else 0.25
    if draw < share_of_tasks:
        return tasks.task_chat(rng, length)
    if draw < share_of_tasks + (1 - share_of_tasks) * 0.65:
        return tasks.document_chat(rng, length)
    return tasks.chunked_chat(rng, length)


def _draw_tool_chat(rng: Random, length: int) -> list[tasks.Message]:
    """A chat with tools or a schema. A chain of two calls is a short chat of its own."""
    kind = rng.random()
    if kind < 0.12 and length >= 256:
        tools, turns = tasks.chain(rng)
        return tasks.flatten(turns, tools)
    make = tasks.schema_chat if kind < 0.32 and length >= 256 else tasks.tool_chat
    return make(rng, int(length * rng.random()))


def draw_row(rng: Random, codec: Codec, length: int) -> tuple[list[int], list[int]]:
    """One training row of at most `length` tokens."""
    weight = LONG_ANSWER_WEIGHT if length >= 1024 else 1
    share_of_plain = 0.3 if length <= 128 else 0.06
    while True:
        if rng.random() < share_of_plain:
            ids, codes = encode_sample(codec, tasks.plain_task(rng, length))
            codes = [1 + weight if code == 2 else code for code in codes]
        else:
            ids, codes = encode_chat(codec, draw_chat(rng, length), length, weight)
        if 0 < len(ids) <= length:
            return ids, codes


def build_slab(rows: Sequence[tuple[list[int], list[int]]], length: int) -> Slab:
    """Pad rows of (ids, codes) to `length` and shift the targets by one."""
    tokens = np.zeros((len(rows), length + 1), np.uint16)
    codes = np.zeros((len(rows), length + 1), np.uint8)
    for index, (ids, row_codes) in enumerate(rows):
        tokens[index, : len(ids)] = ids
        codes[index, : len(ids)] = row_codes
    return Slab(length, tokens[:, :-1].ravel(), tokens[:, 1:].ravel(), codes[:, 1:].ravel())


def draw_length(rng: Random, progress: float, max_length: int) -> int:
    """Draw the length of a slab's rows at this point of the curriculum."""
    limit = min([max_length, *(longest for until, longest in CURRICULUM if progress < until)])
    lengths = [length for length in LENGTH_SHARES if length <= limit]
    return rng.choices(lengths, [LENGTH_SHARES[length] for length in lengths])[0]
