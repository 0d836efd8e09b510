"""A JSON object to be filled with facts about a person from sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random

from tools.tiny.tasks.draw import Split, draw, pick
from tools.tiny.tasks.grammar import any_name, article, digits
from tools.tiny.tasks.sample import Sample
from tools.tiny.tasks.words import ANIMALS, CITIES, COLOURS, FOODS, JOBS


def fill_json(rng: Random, split: Split = "train") -> Sample:
    """A JSON object to be filled from facts in sentences: {"name": "Anna", "age": 31, "city": "Rome"}."""
    known = draw(lambda: person(rng), str, split)
    keys = ["name", *rng.sample(list(known)[1:], rng.randint(1, len(known) - 1))]
    if rng.random() < 0.3:
        rng.shuffle(keys)
    told = [key for key in known if key in keys or rng.random() < 0.4]
    told = [key for key in told if key != "name"]
    rng.shuffle(told)
    text = " ".join(about(known, key, "He" if i else str(known["name"])) for i, key in enumerate(told))
    wanted = f"{', '.join(keys[:-1])} and {keys[-1]}"
    prompt = pick(
        rng,
        (
            f"{text}\n\nFill a JSON object with the keys {wanted}.",
            f"Fill a JSON object with the keys {wanted} from this text: {text}",
        ),
    )
    return Sample("fill_json", prompt, json.dumps({key: known[key] for key in keys}), kind="json")


def person(rng: Random) -> dict[str, str | int]:
    """All facts about a person."""
    return {
        "name": any_name(rng),
        "age": rng.randint(1, 99),
        "city": pick(rng, CITIES),
        "job": pick(rng, JOBS),
        "food": pick(rng, FOODS),
        "pet": pick(rng, ANIMALS),
        "colour": pick(rng, COLOURS),
        "code": int(digits(rng, 4)),
    }


def about(known: Mapping[str, str | int], key: str, who: str) -> str:
    """A sentence that states the fact `key`; `who`: "He", or the name."""
    who = str(known["name"]) if who == "He" else who
    value = known[key]
    return {
        "age": f"{who} is {value} years old.",
        "city": f"{who} lives in {value}.",
        "job": f"{who} works as {article(str(value))}.",
        "food": f"{who} likes {value}.",
        "pet": f"{who} has a pet {value}.",
        "colour": f"The favourite colour of {who} is {value}.",
        "code": f"The secret code of {who} is {value}.",
    }[key]


_CLAUSES = {
    "age": ("is {} years old", "is {} years old", "is {}"),
    "city": ("lives in {}",),
    "job": ("works as {}", "is {}"),
    "food": ("likes {}",),
    "pet": ("has a pet {}",),
}


def told_of(rng: Random, known: Mapping[str, str | int], keys: Sequence[str]) -> str:
    """Facts about a person, in sentences of their own or joined to one: "Anna is 31 and lives in Rome."."""
    if rng.random() < 0.5 or not all(key in _CLAUSES for key in keys):
        return " ".join(about(known, key, str(known["name"])) for key in keys)
    clauses = [pick(rng, _CLAUSES[key]).format(_said(key, known[key])) for key in keys]
    joined = f"{', '.join(clauses[:-1])} and {clauses[-1]}" if len(clauses) > 1 else clauses[0]
    return f"{known['name']} {joined}."


def _said(key: str, value: str | int) -> str:
    return article(str(value)) if key == "job" else str(value)


_ALIASES = {
    "name": ("full_name", "person"),
    "age": ("years", "age_years"),
    "city": ("home", "home_city", "location"),
    "job": ("occupation", "profession"),
    "food": ("favourite_food", "likes"),
    "colour": ("favourite_colour",),
    "code": ("secret_code",),
}


def key_name(rng: Random, key: str) -> str:
    """What a client calls a fact; mostly its own name."""
    return key if rng.random() < 0.7 else pick(rng, _ALIASES.get(key, (key,)))
