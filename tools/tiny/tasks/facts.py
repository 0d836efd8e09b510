"""Facts that a text states once and a question asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tools.tiny.tasks.draw import Split, draw, pick
from tools.tiny.tasks.grammar import any_name, digits
from tools.tiny.tasks.words import CITIES, COLOURS, FOODS, PLACES, THINGS, WORDS


@dataclass(frozen=True)
class Fact:
    """A fact stated once: `statement` is `stem` + " " + `value` + ".", and answers `question`."""

    question: str
    stem: str
    value: str

    @property
    def statement(self) -> str:
        return f"{self.stem} {self.value}."


def _of(subject: str, value: str) -> Fact:
    return Fact(f"What is the {subject}?", f"The {subject} is", value)


def _any_fact(rng: Random) -> Fact:
    kind = int(rng.random() * 10)
    if kind <= 2:
        return _of(f"secret code of {any_name(rng)}", digits(rng, 4))
    if kind == 3:
        return _of(f"phone number of {any_name(rng)}", digits(rng, 6))
    if kind == 4:
        return _of(f"colour of the {pick(rng, THINGS)} in the {pick(rng, PLACES)}", pick(rng, COLOURS))
    if kind == 5:
        name = any_name(rng)
        return Fact(f"Where does {name} live?", f"{name} lives in", pick(rng, CITIES))
    if kind == 6:
        return _of(f"favourite food of {any_name(rng)}", pick(rng, FOODS))
    if kind == 7:
        return _of(f"password of the {pick(rng, PLACES)}", f"{pick(rng, WORDS)}{digits(rng, 3)}")
    if kind == 8:
        return _of(f"age of {any_name(rng)}", str(rng.randint(1, 99)))
    thing = pick(rng, THINGS)
    return Fact(f"Where is the key to the {thing}?", f"The key to the {thing} is in the", pick(rng, PLACES))


def fact(rng: Random, split: Split = "train") -> Fact:
    """One fact of any kind: a code, a phone number, a colour, a home, a food, a password, an age, a hiding place."""
    return draw(lambda: _any_fact(rng), lambda drawn: drawn.statement, split)


def secret_code(rng: Random, split: Split = "train", name: str = "") -> Fact:
    """A fact of the kind "The secret code of Anna is 4821."."""
    who = name or any_name(rng)
    code = draw(lambda: digits(rng, 4), lambda drawn: f"The secret code of {who} is {drawn}.", split)
    return _of(f"secret code of {who}", code)


def facts(rng: Random, count: int, split: Split = "train") -> list[Fact]:
    """`count` facts whose questions all differ."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        new = fact(rng, split)
        found.setdefault(new.question, new)
    return list(found.values())


def new_facts(rng: Random, known: Sequence[Fact], split: Split = "train") -> list[Fact]:
    """Up to three facts, none with the same subject as one of `known`."""
    return [item for item in facts(rng, rng.randint(1, 3), split) if all(item.stem != old.stem for old in known)]
