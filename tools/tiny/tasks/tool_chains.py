"""Questions that take two calls, the second of which needs the result of the first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from tools.tiny.tasks.draw import Split, draw, pick
from tools.tiny.tasks.grammar import any_name
from tools.tiny.tasks.sample import Message, Sample
from tools.tiny.tasks.tool_calls import calls_text, tool_of
from tools.tiny.tasks.tool_kinds import KINDS, ToolKind, Value, city, number

Step = tuple[dict[str, Any], Sequence[Value], str]
"""A tool, the values it is called with, and its result."""

_HOME = ToolKind(
    ("get_city", "lookup_city", "find_home", "get_home", "where_lives", "get_user_city"),
    ("Get the city where a person lives.", "Look up the home of a person.", "Return a person's city.", ""),
    tuple(slot for kind in KINDS if "find_user" in kind.names for slot in kind.slots),
    ("Where does {0} live?",),
    lambda rng, values: city(rng),
)
_PLACED = [kind for kind in KINDS if kind.names[0] in {"get_weather", "get_time"} and len(kind.slots) == 1]
_ADD = next(kind for kind in KINDS if "add" in kind.names)


def chain(rng: Random, split: Split = "train") -> tuple[tuple[dict[str, Any], ...], list[Message]]:
    """The tools, and the turns: question, call, result, call, result, answer."""
    return _sum_of_three(rng, split) if rng.random() < 0.4 else _at_home(rng, split)


def tool_chain(rng: Random, split: Split = "train") -> Sample:
    """One of the steps of such a chat: the first call, the second, or the answer."""
    tools, turns = chain(rng, split)
    step = pick(rng, (1, 3, 5))
    *history, last = turns[:step]
    role, calls = last["role"], turns[step].get("tool_calls")
    answer = calls_text(calls) if calls else turns[step]["content"]
    return Sample(
        "tool_chain",
        last["content"],
        answer,
        kind="calls" if calls else "exact",
        history=tuple(history),
        tools=tools,
        role=role,
    )


def _sum_of_three(rng: Random, split: Split) -> tuple[tuple[dict[str, Any], ...], list[Message]]:
    add = tool_of(rng, _ADD)
    a, b, c = draw(lambda: (number(rng), number(rng), number(rng)), str, split)
    question = pick(rng, ("What is {} plus {} plus {}?", "Add {}, {} and {}.", "What is {} + {} + {}?")).format(a, b, c)
    tools = [add, tool_of(rng, pick(rng, _PLACED))][: rng.randint(1, 2)]
    rng.shuffle(tools)
    steps: Sequence[Step] = [
        (add, [a, b], str(a + b)),
        (add, [a + b, c], str(a + b + c)),
    ]
    return tuple(tools), _turns(question + pick(rng, ("", " Use the tool.", " Use the tools.")), steps)


def _at_home(rng: Random, split: Split) -> tuple[tuple[dict[str, Any], ...], list[Message]]:
    home, other = tool_of(rng, _HOME), tool_of(rng, kind := pick(rng, _PLACED))
    name, place = draw(lambda: (any_name(rng), city(rng)), str, split)
    what = "weather" if kind is _PLACED[0] else "time"
    question = pick(
        rng,
        (
            "What is the {1} where {0} lives?",
            "What is the {1} in the city of {0}?",
            "Find out where {0} lives, then tell me the {1} there.",
            "Look up the city of {0} and then the {1} there.",
        ),
    ).format(name, what)
    told = pick(rng, (place, place, f"{name} lives in {place}.", json.dumps({"city": place})))
    tools = [home, other]
    rng.shuffle(tools)
    return tuple(tools), _turns(question, [(home, [name], told), (other, [place], kind.result(rng, [place]))])


def _turns(question: str, steps: Sequence[Step]) -> list[Message]:
    turns: list[Message] = [{"role": "user", "content": question}]
    name = ""
    for tool, values, result in steps:
        function = tool["function"]
        name = function["name"]
        arguments = dict(zip(function["parameters"]["properties"], values, strict=True))
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        turns.append({"role": "tool", "content": result})
    return [*turns, {"role": "assistant", "content": f"According to {name}: {steps[-1][2]}"}]
