"""A JSON object to be filled with facts about a person from sentences."""

from __future__ import annotations

import json
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


def about(known: dict[str, str | int], key: str, who: str) -> str:
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
