"""Names and sentences built from the words, and an estimate of a text's number of tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from tools.tiny.tasks.draw import pick
from tools.tiny.tasks.words import (
    ADJECTIVES,
    ADVERBS,
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    JOBS,
    MOTIONS,
    NAMES,
    OPENERS,
    PLACES,
    SPEECH,
    THINGS,
    VERBS_PAST,
    WEATHER,
    WHEN,
    WORDS,
)

# The pre-tokenizer's rule as far as Python's `re` can express it (it splits ASCII text identically): one digit, a word
# with the space before it, a run of punctuation with the space before it, white space.
PIECE = re.compile(r"[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def estimate_tokens(text: str) -> int:
    """The number of tokens of `text` to within a few per cent: nearly every word of the grammar is one token."""
    return len(PIECE.findall(text))


def article(word: str) -> str:
    """`word` preceded by "a" or "an"."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def commas(items: Sequence[object]) -> str:
    """The items in order, separated by commas."""
    return ", ".join(map(str, items))


def digits(rng: Random, count: int) -> str:
    """A number of `count` digits, the first of which is not 0."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def invented_name(rng: Random) -> str:
    """A name that is in no list, such as Velkora: several tokens long."""
    syllables = "ba be da dor el fa fin gar hel in ka kor la len ma mi nor or pa ra rin sa sol ta tor ul va vel zan zi"
    return "".join(pick(rng, syllables.split()) for _ in range(rng.randint(2, 4))).capitalize()


def any_name(rng: Random) -> str:
    """A name, invented one time in ten."""
    return pick(rng, NAMES) if rng.random() < 0.9 else invented_name(rng)


def filler_sentence(rng: Random) -> str:
    """A sentence that answers no question, though it uses the same names and things."""
    p, kind = pick, int(rng.random() * 14)
    if kind == 0:
        return f"{p(rng, NAMES)} {p(rng, VERBS_PAST)} the {p(rng, ADJECTIVES)} {p(rng, THINGS)} {p(rng, WHEN)}."
    if kind == 1:
        animal = f"{p(rng, ADJECTIVES)} {p(rng, ANIMALS)}"
        return f"The {animal} {p(rng, MOTIONS)} {p(rng, ADVERBS)} to the {p(rng, PLACES)}."
    if kind == 2:
        return f"It was {p(rng, WEATHER)} in {p(rng, CITIES)} {p(rng, WHEN)}."
    if kind == 3:
        return f"{p(rng, NAMES)} {p(rng, SPEECH)} that the {p(rng, PLACES)} was too {p(rng, ADJECTIVES)}."
    if kind == 4:
        return f"There was {article(p(rng, ADJECTIVES))} {p(rng, THINGS)} near the {p(rng, PLACES)}."
    if kind == 5:
        return f"{p(rng, NAMES)} and {p(rng, NAMES)} {p(rng, MOTIONS)} from {p(rng, CITIES)} to {p(rng, CITIES)}."
    if kind == 6:
        return f"{p(rng, OPENERS)}, {p(rng, NAMES)} ate {p(rng, FOODS)} with {p(rng, FOODS)}."
    if kind == 7:
        return f"The {p(rng, JOBS)} {p(rng, VERBS_PAST)} {article(p(rng, COLOURS))} {p(rng, THINGS)}."
    if kind == 8:
        return f"Nobody {p(rng, SPEECH)} why the {p(rng, ANIMALS)} was so {p(rng, ADJECTIVES)}."
    if kind == 9:
        return f"{p(rng, NAMES)} {p(rng, ADVERBS)} {p(rng, VERBS_PAST)} {rng.randint(2, 99)} {p(rng, WORDS)} cards."
    if kind == 10:
        return f"A {p(rng, JOBS)} from {p(rng, CITIES)} {p(rng, MOTIONS)} past the {p(rng, PLACES)} {p(rng, WHEN)}."
    if kind == 11:
        return f"The {p(rng, FOODS)} in the {p(rng, PLACES)} smelled {p(rng, ADJECTIVES)} and {p(rng, ADJECTIVES)}."
    if kind == 12:
        return f"{p(rng, NAMES)} met {p(rng, NAMES)} at the {p(rng, PLACES)} in {p(rng, CITIES)}."
    return f"Then the {p(rng, ANIMALS)} saw the {p(rng, WORDS)} and the {p(rng, WORDS)} by the {p(rng, PLACES)}."


def filler(rng: Random, num_tokens: int) -> list[str]:
    """Filler sentences of about `num_tokens` tokens in all."""
    sentences, count = [], 0
    while count < num_tokens:
        sentence = filler_sentence(rng)
        count += sentence.count(" ") + 2  # the words and the full stop
        sentences.append(sentence)
    return sentences
