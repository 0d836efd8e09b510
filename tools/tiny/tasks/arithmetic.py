"""Sums of two and of three numbers."""

from __future__ import annotations

from random import Random

from tools.tiny.tasks.draw import Split, draw, in_split, pick
from tools.tiny.tasks.sample import Sample


def sums(rng: Random, split: Split = "train", plain: bool = False) -> Sample:
    """The sum of two numbers of up to two digits: "What is 12 + 7?" is answered by "12 + 7 = 19"."""
    a, b = draw(lambda: _terms(rng), _sum_key, split)
    if plain:
        return Sample("sums_plain", f"{a} + {b} =", f" {a + b}", plain=True)
    prompt = pick(rng, (f"What is {a} + {b}?", f"Add {a} and {b}.", f"{a} + {b} = ?"))
    return Sample("sums", prompt, f"{a} + {b} = {a + b}")


def _terms(rng: Random) -> tuple[int, int]:
    top = 100 if rng.random() < 0.8 else 10
    return int(rng.random() * top), int(rng.random() * 100)


def _sum_key(terms: tuple[int, int]) -> str:
    return f"{min(terms)}+{max(terms)}"


def sums3(rng: Random, split: Split = "train") -> Sample:
    """The sum of three numbers up to 49, answered in two steps."""
    a, b, c = draw(lambda: _three_terms(rng), lambda drawn: "{}+{}+{}".format(*sorted(drawn)), split)
    answer = f"{a} + {b} = {a + b} and {a + b} + {c} = {a + b + c}"
    return Sample("sums3", f"What is {a} + {b} + {c}?", answer)


def _three_terms(rng: Random) -> tuple[int, int, int]:
    """Three terms whose two partial sums are both training sums, so that `sums` keeps its held-out pairs."""
    while True:
        a, b, c = (int(rng.random() * 50) for _ in range(3))
        if in_split(_sum_key((a, b)), "train") and in_split(_sum_key((a + b, c)), "train"):
            return a, b, c
