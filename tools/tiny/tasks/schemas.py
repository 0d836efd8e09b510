"""JSON objects of a given JSON schema, to be filled from sentences, as libraries for structured output ask for them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tools.tiny.tasks.draw import Split, draw, pick
from tools.tiny.tasks.grammar import estimate_tokens
from tools.tiny.tasks.people import key_name, person, told_of
from tools.tiny.tasks.sample import Message, Sample

_TITLES = ("Person", "User", "UserInfo", "Customer", "Employee", "Answer", "Contact")
_ASKED = (  # text before the schema, and after it
    ("Answer as JSON by this schema: ", ""),
    ("Answer in JSON with this schema:\n", ""),
    ("Answer with a JSON object that matches this schema:\n\n", ""),
    ("Return a JSON object of this schema:\n```json\n", "\n```"),
    (
        "As a genius expert, your task is to understand the content and provide\nthe parsed objects in json that match "
        "the following json_schema:\n\n\n",
        "\n\nMake sure to return an instance of the JSON, not the schema itself\n",
    ),
    (
        "Always respond with a JSON object that's compatible with this schema:\n\n",
        "\n\nDon't include any text or Markdown fencing before or after.",
    ),
    (
        "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\nHere is the "
        "output schema:\n```\n",
        "\n```",
    ),
)
_LEADS = ("", "", "Extract: ", "Extract the person: ", "Text: ", "Extract the data from this text: ")


def fill_schema(rng: Random, split: Split = "train") -> Sample:
    """An object of a schema that is in the system turn or in the question; sometimes of all facts, without a schema."""
    known, keys = _wanted(rng, split)
    text = pick(rng, _LEADS) + _sentences(rng, known, keys)
    if rng.random() < 0.15:
        return _without_schema(rng, known)
    named = {key_name(rng, key): known[key] for key in keys}
    asked = _request(rng, named)
    answer = json.dumps(named)
    if rng.random() < 0.5:
        history: tuple[Message, ...] = ({"role": "system", "content": asked},)
        return Sample("fill_schema", text, answer, kind="json", history=history)
    prompt = f"{text}\n\n{asked}" if rng.random() < 0.5 else f"{asked}\n\n{text}"
    return Sample("fill_schema", prompt, answer, kind="json")


def schema_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat whose every turn fills a schema, that ends near `num_tokens` tokens. A schema in the system turn holds
    throughout."""
    known, keys = _wanted(rng, split)
    names = {key: key_name(rng, key) for key in keys}
    system = rng.random() < 0.5
    messages: list[Message] = []
    if system:
        messages = [{"role": "system", "content": _request(rng, {names[key]: known[key] for key in keys})}]
    while True:
        if system:
            messages.append({"role": "user", "content": pick(rng, _LEADS) + _sentences(rng, known, keys)})
            messages.append({"role": "assistant", "content": json.dumps({names[key]: known[key] for key in keys})})
            known = draw(lambda: person(rng), str, split)
        else:
            sample = fill_schema(rng, split)
            while sample.history:
                sample = fill_schema(rng, split)
            messages.append({"role": "user", "content": sample.prompt})
            messages.append({"role": "assistant", "content": sample.answer})
        if sum(estimate_tokens(message["content"]) + 5 for message in messages) >= num_tokens:
            return messages


def _wanted(rng: Random, split: Split) -> tuple[dict[str, str | int], list[str]]:
    """All facts about a person, and the keys of those that are wanted."""
    known = draw(lambda: person(rng), str, split)
    keys = ["name", *rng.sample(list(known)[1:], rng.randint(1, 4))]
    if rng.random() < 0.3:
        rng.shuffle(keys)
    return known, keys


def _sentences(rng: Random, known: dict[str, str | int], keys: list[str]) -> str:
    told = [key for key in known if key != "name" and (key in keys or rng.random() < 0.2)]
    rng.shuffle(told)
    return told_of(rng, known, told)


def _without_schema(rng: Random, known: dict[str, str | int]) -> Sample:
    keys = rng.sample(list(known)[1:], rng.randint(1, 4))
    end = pick(rng, ("Answer as JSON.", "Answer in JSON.", "Return JSON."))
    answer = {key: known[key] for key in ("name", *keys)}
    return Sample("fill_schema", f"{told_of(rng, known, keys)}\n\n{end}", json.dumps(answer), kind="json")


def _request(rng: Random, named: dict[str, str | int]) -> str:
    before, after = pick(rng, _ASKED)
    return before + json.dumps(_schema(rng, named), indent=pick(rng, (None, None, 2))) + after


def _schema(rng: Random, named: dict[str, str | int]) -> dict[str, Any]:
    """The schema in one of the forms of client libraries: keys in any order, some with titles."""
    titled = rng.random() < 0.6
    properties = {}
    for key, value in named.items():
        type_ = {"type": "integer" if isinstance(value, int) else "string"}
        properties[key] = {"title": key.replace("_", " ").title(), **type_} if titled else type_
    title = pick(rng, _TITLES)
    parts: list[tuple[str, Any]] = [("properties", properties), ("required", list(named)), ("type", "object")]
    if titled:
        parts.insert(2, ("title", title))
    if rng.random() < 0.3:
        parts.append(("additionalProperties", False))
    if rng.random() < 0.2:
        parts.insert(0, ("description", f"A {title.lower()}."))
    if rng.random() < 0.4:
        parts.sort(key=lambda part: part[0] != "type")
    return dict(parts)
