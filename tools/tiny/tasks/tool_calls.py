"""Tools to be called, answers to be made from their results, and the form in which the chat template writes both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.tiny.tasks.draw import Split, draw, pick
from tools.tiny.tasks.grammar import estimate_tokens, filler_sentence
from tools.tiny.tasks.mix import short_task
from tools.tiny.tasks.people import key_name, person, told_of
from tools.tiny.tasks.sample import Message, Sample
from tools.tiny.tasks.small_talk import small_talk
from tools.tiny.tasks.tool_kinds import KINDS, ToolKind, Value, generic_kind, schema_of

MAX_DESCRIPTION = 80
_EXTRACTORS = (
    ("Person", "Correctly extracted `Person` with all the required parameters with correct types"),
    ("User", "Correctly extracted `User` with all the required parameters with correct types"),
    ("UserInfo", ""),
    ("UserDetail", "A user."),
    ("Employee", ""),
    ("Customer", "A customer."),
    ("PersonInfo", "Information about a person."),
    ("Answer", ""),
    ("extract", "Extract the data."),
    ("extract_person", "Extract a person."),
    ("final_result", "The final response which ends this conversation"),
)
_LEADS = ("", "", "Extract the person: ", "Extract: ", "Extract the data from this text: ", "Who is this? ")
_ENDS = ("", "", "", " Extract the person.", "\n\nExtract the data.", " Extract it.")


@dataclass(frozen=True)
class Wish:
    """A question and the call that it asks for: of `kind`, under a client's names."""

    kind: ToolKind
    tool: dict[str, Any]
    question: str
    arguments: dict[str, Value]

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])

    @property
    def call(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def result(self, rng: Random) -> str:
        return self.kind.result(rng, list(self.arguments.values()))


# ---- the form, as in the chat template ----


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """What the system turn says of the tools: a line for each, with its parameters and the beginning of its
    description."""
    return "\n".join(["You can call these tools:", *(_signature(tool["function"]) for tool in tools)])


def _signature(function: Mapping[str, Any]) -> str:
    properties = (function.get("parameters") or {}).get("properties") or {}
    required = (function.get("parameters") or {}).get("required") or []
    parameters = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type_text(schema)}" for name, schema in properties.items()
    )
    description = (function.get("description") or "").strip().split("\n")[0][:MAX_DESCRIPTION]
    return f"{function['name']}({parameters})" + (f" {description}" if description else "")


def _type_text(schema: Mapping[str, Any]) -> str:
    return "|".join(map(str, schema["enum"])) if schema.get("enum") else str(schema.get("type") or "any")


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """An assistant's turn that calls tools."""
    return "\n".join(f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls)


def flatten(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A chat with tools as turns of text alone, as the chat template writes it."""
    flat = [_flat(message) for message in messages]
    if not tools:
        return flat
    first = flat.pop(0)["content"] + "\n\n" if flat and flat[0]["role"] == "system" else ""
    return [{"role": "system", "content": first + tools_text(tools)}, *flat]


def _flat(message: Message) -> Message:
    if not message.get("tool_calls"):
        return {"role": message["role"], "content": message["content"]}
    return {"role": message["role"], "content": calls_text(message["tool_calls"])}


# ---- tasks ----


def tool_call(rng: Random, split: Split = "train") -> Sample:
    """One call of one of several tools."""
    tools, wishes = _offer(rng, split, 1)
    return _asking(rng, "tool_call", tools, wishes)


def tool_calls(rng: Random, split: Split = "train") -> Sample:
    """Two calls at once, of one tool or of two."""
    tools, wishes = _offer(rng, split, 2)
    return _asking(rng, "tool_calls", tools, wishes)


def tool_extract(rng: Random, split: Split = "train") -> Sample:
    """A call whose arguments are facts from sentences, as libraries for structured output ask for them."""
    tool, question, arguments = _extraction(rng, split)
    call = {"function": {"name": tool["function"]["name"], "arguments": arguments}}
    return Sample("tool_extract", question, calls_text([call]), kind="calls", tools=(tool,))


def tool_result(rng: Random, split: Split = "train") -> Sample:
    """An answer from the results of one call or of two, each result in a turn of its own after the calls."""
    tools, wishes = _offer(rng, split, rng.choice((1, 1, 2)))
    asked = _asking(rng, "tool_result", tools, wishes)
    results = [wish.result(rng) for wish in wishes]
    turns = _result_turns(asked, wishes, results)
    *history, last = turns
    return Sample(
        "tool_result", last["content"], answer_from(wishes, results), history=tuple(history), tools=tools, role="tool"
    )


def no_tool(rng: Random, split: Split = "train") -> Sample:
    """Tools are offered, and the question needs none."""
    tools, _ = _offer(rng, split, 1, avoid_arithmetic=True)
    plain = small_talk(rng, split) if rng.random() < 0.3 else short_task(rng, split)
    return Sample("no_tool", plain.prompt, plain.answer, kind=plain.kind, mentions=plain.mentions, tools=tools)


def answer_from(wishes: Sequence[Wish], results: Sequence[str]) -> str:
    """The answer to a question whose tools returned this."""
    return " ".join(f"According to {wish.name}: {result}" for wish, result in zip(wishes, results, strict=True))


def tool_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat with the same tools throughout, as turns of text, that ends near `num_tokens` tokens."""
    if rng.random() < 0.22:
        tool, question, arguments = _extraction(rng, split)
        calls = [{"function": {"name": tool["function"]["name"], "arguments": arguments}}]
        turns: list[Message] = [{"role": "user", "content": question}, {"role": "assistant", "tool_calls": calls}]
        return flatten([*_maybe_system(rng), *turns], [tool])
    tools, wishes = _offer(rng, split, rng.choice((1, 1, 1, 2)))
    messages, count = _maybe_system(rng), estimate_tokens(tools_text(tools)) + 5
    while True:
        turn = _turn(rng, split, wishes)
        messages += turn
        count += sum(estimate_tokens(message["content"]) + 5 for message in flatten(turn, []))
        if count >= num_tokens:
            return flatten(messages, tools)
        wishes = [_again(rng, split, wish.kind, wish.tool) for wish in rng.sample(wishes, rng.randint(1, len(wishes)))]


def _turn(rng: Random, split: Split, wishes: Sequence[Wish]) -> list[Message]:
    """A question, calls, results and the answer; now and then a question that needs no tool."""
    if rng.random() < 0.12 and not any("number" in wish.question or _is_arithmetic(wish.kind) for wish in wishes):
        plain = small_talk(rng, split) if rng.random() < 0.3 else short_task(rng, split)
        return [{"role": "user", "content": plain.prompt}, {"role": "assistant", "content": plain.answer}]
    results = [wish.result(rng) for wish in wishes]
    question = {"role": "user", "content": _joined(rng, wishes)}
    steps = (
        [[wish] for wish in wishes] if rng.random() < 0.25 else [wishes]
    )  # one at a time: a client may allow no more
    messages: list[Message] = [question]
    for step in steps:
        messages.append({"role": "assistant", "content": "", "tool_calls": [wish.call for wish in step]})
        messages += [{"role": "tool", "content": results[wishes.index(wish)]} for wish in step]
    return [*messages, {"role": "assistant", "content": answer_from(wishes, results)}]


def _asking(rng: Random, task: str, tools: tuple[dict[str, Any], ...], wishes: Sequence[Wish]) -> Sample:
    return Sample(task, _joined(rng, wishes), calls_text([wish.call for wish in wishes]), kind="calls", tools=tools)


def _result_turns(asked: Sample, wishes: Sequence[Wish], results: Sequence[str]) -> list[Message]:
    calls = {"role": "assistant", "content": "", "tool_calls": [wish.call for wish in wishes]}
    told = [{"role": "tool", "content": result} for result in results]
    return [{"role": "user", "content": asked.prompt}, calls, *told]


def _joined(rng: Random, wishes: Sequence[Wish]) -> str:
    """One text that asks for all of them."""
    questions = [wish.question for wish in wishes]
    if len(questions) == 1:
        return questions[0]
    return pick(rng, (" ", " And ", " Also: ", "\n")).join(questions)


def _offer(
    rng: Random, split: Split, num_wishes: int, avoid_arithmetic: bool = False
) -> tuple[tuple[dict[str, Any], ...], list[Wish]]:
    """Tools with distinct names, in any order, and questions that ask for calls of one or two of them."""
    kinds = [kind for kind in KINDS if not (avoid_arithmetic and _is_arithmetic(kind))]
    chosen = [generic_kind(rng) if rng.random() < 0.35 else pick(rng, kinds) for _ in range(rng.randint(1, 4))]
    tools: dict[str, tuple[ToolKind, dict[str, Any]]] = {}
    for kind in chosen:
        if not any(kind is other for other, _ in tools.values()):
            tool = tool_of(rng, kind)
            tools.setdefault(tool["function"]["name"], (kind, tool))
    offered = list(tools.values())
    wanted = [pick(rng, offered) for _ in range(num_wishes)]
    wishes = [_again(rng, split, kind, tool) for kind, tool in wanted]
    rng.shuffle(offered)
    return tuple(tool for _, tool in offered), wishes


def tool_of(rng: Random, kind: ToolKind) -> dict[str, Any]:
    """A tool as a client describes it."""
    which = int(rng.random() * 1000)
    properties = {slot.names[which % len(slot.names)]: schema_of(slot) for slot in kind.slots}
    required = list(properties)
    if kind.bare and rng.random() < 0.7:
        required.pop()
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": pick(rng, kind.names), "description": pick(rng, kind.descriptions), "parameters": parameters}
    return {"type": "function", "function": function}


def _again(rng: Random, split: Split, kind: ToolKind, tool: dict[str, Any]) -> Wish:
    """A question for this tool."""
    parameters = tool["function"]["parameters"]
    names = list(parameters["properties"])
    is_bare = len(parameters["required"]) < len(names) and rng.random() < 0.6
    slots = kind.slots[: len(kind.slots) - is_bare]
    questions = kind.bare if is_bare else kind.questions

    def wish() -> Wish:
        values = [slot.draw(rng) for slot in slots]
        said = [slot.say(value) for slot, value in zip(slots, values, strict=True)]
        return Wish(kind, tool, pick(rng, questions).format(*said), dict(zip(names, values, strict=False)))

    return draw(wish, lambda made: made.question, split)


def _is_arithmetic(kind: ToolKind) -> bool:
    return any("two numbers" in text for text in kind.descriptions)


def _extraction(rng: Random, split: Split) -> tuple[dict[str, Any], str, dict[str, Value]]:
    """A tool that takes facts about a person, sentences with these facts, and the arguments."""
    known = draw(lambda: person(rng), str, split)
    keys = ["name", *rng.sample(list(known)[1:], rng.randint(1, 4))]
    if rng.random() < 0.3:
        rng.shuffle(keys)
    told = [key for key in known if key != "name" and (key in keys or rng.random() < 0.2)]
    rng.shuffle(told)
    text = told_of(rng, known, told)
    named = {key_name(rng, key): known[key] for key in keys}
    name, description = pick(rng, _EXTRACTORS)
    properties = {key: {"type": "integer" if isinstance(value, int) else "string"} for key, value in named.items()}
    parameters = {"type": "object", "properties": properties, "required": list(named)}
    function = {"name": name, "description": description, "parameters": parameters}
    question = pick(rng, _LEADS) + text + pick(rng, _ENDS)
    return {"type": "function", "function": function}, question, named


def _maybe_system(rng: Random) -> list[Message]:
    if rng.random() < 0.6:
        return []
    lead = ("You are a helpful assistant.", "Answer briefly.", "Use the tools.", filler_sentence(rng))
    return [{"role": "system", "content": pick(rng, lead)}]
