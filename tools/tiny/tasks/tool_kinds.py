"""Tools that a user may want called: how clients name and describe them, how users ask for them, what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.tiny.tasks.draw import pick
from tools.tiny.tasks.grammar import any_name, digits, invented_name
from tools.tiny.tasks.words import CITIES, COLOURS, FOODS, PLACES, THINGS, WEATHER, WORDS

Value = str | int | bool


@dataclass(frozen=True)
class Slot:
    """A parameter of a tool. `names` that clients give it; `draw`: a value; `words`: how questions say a boolean."""

    names: tuple[str, ...]
    type: str
    draw: Callable[[Random], Value]
    enum: tuple[str, ...] = ()
    words: tuple[str, str] = ("true", "false")

    def say(self, value: Value) -> str:
        """The value as a question mentions it."""
        return self.words[not value] if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class ToolKind:
    """`questions` have a place for each slot; `bare` ones leave out the last, which is then optional. `result`: what
    the tool returns, as text."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    questions: tuple[str, ...]
    result: Callable[[Random, Sequence[Value]], str]
    bare: tuple[str, ...] = ()


def word(rng: Random) -> str:
    """A common word."""
    return pick(rng, WORDS)


def number(rng: Random) -> int:
    """A number of one to four digits."""
    return int(digits(rng, rng.randint(1, 4)))


def city(rng: Random) -> str:
    """A city, invented one time in ten."""
    return pick(rng, CITIES) if rng.random() < 0.9 else invented_name(rng)


def phrase(rng: Random) -> str:
    """One to four words."""
    return " ".join(word(rng) for _ in range(rng.randint(1, 4)))


def _numbers(names: Sequence[tuple[str, str]]) -> tuple[Slot, Slot]:
    first, second = zip(*names, strict=True)
    return Slot(tuple(first), "integer", number), Slot(tuple(second), "integer", number)


_PAIRS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("number1", "number2"))
_CITY = Slot(("city", "location", "place", "town", "city_name"), "string", city)
_PERSON = Slot(("name", "person", "user", "who", "full_name"), "string", any_name)
_UNITS = ("celsius", "fahrenheit")
_SWITCH = Slot(("on", "is_on"), "boolean", lambda rng: rng.random() < 0.5, words=("on", "off"))
_HINTS = ("", "", "", " Use the tool.", " Use a tool.", " Please.")


def _weather(rng: Random, values: Sequence[Value]) -> str:
    sky, degrees = pick(rng, WEATHER), rng.randint(-9, 39)
    return pick(
        rng,
        (
            f"{sky.capitalize()}, {degrees} degrees.",
            f"It is {sky} in {values[0]}.",
            f"It's always {sky} in {values[0]}!",
            f"{degrees} degrees and {sky}",
            sky,
        ),
    )


def any_result(rng: Random, values: Sequence[Value]) -> str:
    """A number, a word, a sentence or a JSON object that says something about the values."""
    subject = str(values[0]).lower() if values else "it"
    kind = int(rng.random() * 6)
    if kind == 0:
        return str(number(rng))
    if kind == 1:
        return phrase(rng)
    if kind == 2:
        return f"The {word(rng)} of {subject} is {number(rng)}."
    if kind == 3:
        return f'{{"{word(rng)}": {number(rng)}, "{word(rng)}": "{word(rng)}"}}'
    if kind == 4:
        return f"{any_name(rng)}, {number(rng)}, {city(rng)}"
    return f"{phrase(rng).capitalize()} in {city(rng)}."


def _arithmetic(name: Sequence[str], what: str, asked: Sequence[str], compute: Callable[[int, int], int]) -> ToolKind:
    return ToolKind(
        tuple(name),
        (f"{what} two numbers.", f"{what} two integers and return the result.", f"{what} a and b.", ""),
        _numbers(_PAIRS),
        tuple(f"{question}{hint}" for question in asked for hint in _HINTS),
        lambda rng, values: str(compute(int(values[0]), int(values[1]))),
    )


_WEATHER_QUESTIONS = (
    *("What is the weather in {0}?", "What's the weather in {0}?", "How is the weather in {0}?"),
    *("What is the weather like in {0}?", "What's the weather like in {0}?", "Tell me the weather in {0}."),
    *("What is the weather in {0} today?", "Weather in {0}?", "what is the weather in {0}"),
)

KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        ("get_weather", "get_weather", "get_current_weather", "weather", "fetch_weather", "check_weather"),
        ("Get the weather in a city.", "Get the current weather.", "Return the weather of a place.", "Weather.", ""),
        (_CITY,),
        _WEATHER_QUESTIONS,
        _weather,
    ),
    ToolKind(
        ("get_weather", "get_current_weather", "get_temperature"),
        ("Get the weather in a city.", "Get the current weather in a given unit.", ""),
        (_CITY, Slot(("unit", "units"), "string", lambda rng: pick(rng, _UNITS), ("celsius", "fahrenheit"))),
        ("What is the weather in {0} in {1}?", "What is the temperature in {0} in {1}?", "Weather in {0}, in {1}?"),
        _weather,
        bare=_WEATHER_QUESTIONS,
    ),
    ToolKind(
        ("get_time", "get_current_time", "time_in"),
        ("Get the time in a city.", "Return the current time.", ""),
        (_CITY,),
        ("What time is it in {0}?", "What is the time in {0}?", "Tell me the time in {0}."),
        lambda rng, values: f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
    ),
    _arithmetic(
        ("add", "add", "add_numbers", "sum", "plus"),
        "Add",
        ("What is {0} plus {1}?", "Add {0} and {1}.", "What is {0} + {1}?", "Calculate {0} + {1}."),
        lambda a, b: a + b,
    ),
    _arithmetic(
        ("multiply", "multiply", "multiply_numbers", "product", "times"),
        "Multiply",
        ("What is {0} times {1}?", "Multiply {0} by {1}.", "What is {0} * {1}?", "Multiply {0} and {1}."),
        lambda a, b: a * b,
    ),
    _arithmetic(
        ("subtract", "minus", "difference"),
        "Subtract",
        ("What is {0} minus {1}?", "What is {0} - {1}?", "Calculate {0} - {1}."),
        lambda a, b: a - b,
    ),
    ToolKind(
        ("get_phone_number", "lookup_phone", "phone_number", "find_phone"),
        ("Look up the phone number of a person.", "Get a phone number.", ""),
        (_PERSON,),
        ("What is the phone number of {0}?", "Look up the phone number of {0}.", "Find {0}'s phone number."),
        lambda rng, values: digits(rng, 6),
    ),
    ToolKind(
        ("find_user", "get_user", "lookup_user", "get_person"),
        ("Find a user by name.", "Return what is known about a user.", ""),
        (_PERSON,),
        ("Find the user {0}.", "Look up {0}.", "Who is {0}?", "Look up the user {0}."),
        any_result,
    ),
    ToolKind(
        ("search", "web_search", "search_web", "search_documents"),
        ("Search the web.", "Search for a query.", "Find documents.", ""),
        (Slot(("query", "q", "text"), "string", phrase),),
        ("Search for {0}.", "Search the web for {0}.", "Find {0}.", "Please search for {0}."),
        any_result,
    ),
    ToolKind(
        ("get_price", "price_of", "lookup_price"),
        ("Get the price of an item.", "Return a price.", ""),
        (Slot(("item", "product", "thing"), "string", lambda rng: pick(rng, (*THINGS, *FOODS))),),
        ("What is the price of the {0}?", "How much is the {0}?", "What does the {0} cost?"),
        lambda rng, values: f"{number(rng)} dollars",
    ),
    ToolKind(
        ("set_timer", "start_timer"),
        ("Set a timer.", "Start a timer for some minutes.", ""),
        (Slot(("minutes", "duration"), "integer", number),),
        ("Set a timer for {0} minutes.", "Start a timer for {0} minutes."),
        lambda rng, values: pick(rng, ("ok", "done", f"timer set to {values[0]}")),
    ),
    ToolKind(
        ("switch_light", "set_light", "light"),
        ("Switch the light in a room.", "Turn a light on or off.", ""),
        (Slot(("room", "where"), "string", lambda rng: pick(rng, PLACES)), _SWITCH),
        ("Turn {1} the light in the {0}.", "Switch {1} the light in the {0}.", "Turn the light in the {0} {1}."),
        lambda rng, values: pick(rng, ("ok", "done")),
    ),
    ToolKind(
        ("send_message", "send_email", "send"),
        ("Send a message to a person.", "Send a text.", ""),
        (Slot(("to", "recipient"), "string", any_name), Slot(("text", "body", "message"), "string", phrase)),
        ('Send "{1}" to {0}.', 'Write "{1}" to {0}.', 'Send {0} the message "{1}".'),
        lambda rng, values: pick(rng, ("sent", "ok", "message sent")),
    ),
    ToolKind(
        ("book_table", "reserve_table", "book"),
        ("Book a table.", "Reserve a table in a city for some people.", ""),
        (_CITY, Slot(("people", "guests", "num_people"), "integer", lambda rng: rng.randint(1, 20))),
        ("Book a table for {1} people in {0}.", "Reserve a table in {0} for {1} people."),
        any_result,
    ),
)

_VERBS = ("get", "find", "make", "open", "close", "read", "write", "check", "set", "start", "count", "list", "lookup")
_GENERIC: tuple[tuple[str, Callable[[Random], Value]], ...] = (
    ("string", word),
    ("string", city),
    ("string", any_name),
    ("integer", number),
    ("string", lambda rng: pick(rng, COLOURS)),
    ("boolean", lambda rng: rng.random() < 0.5),
)
_NUM_FEW = 2
"""Of the last ones, so few values are drawn that maybe none of them is held out."""


def generic_kind(rng: Random) -> ToolKind:
    """A tool of any name, called by its name."""
    verb, noun = pick(rng, _VERBS), word(rng)
    name = pick(rng, (f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", noun, f"{noun}_{word(rng)}"))
    slots: list[Slot] = []
    for parameter in dict.fromkeys(word(rng) for _ in range(rng.randint(1, 3))):
        kind, draw = pick(rng, _GENERIC[: None if slots else -_NUM_FEW])
        slots.append(Slot((parameter,), kind, draw))
    said = " and ".join(f"{slot.names[0]} {{{i}}}" for i, slot in enumerate(slots))
    leads = ("Call", "Use", "Please call", "Run")
    questions = tuple(f"{lead} {name} with {said}." for lead in leads)
    less = said.rpartition(" and ")[0]
    bare = tuple(f"{lead} {name} with {less}." for lead in leads) if less and rng.random() < 0.4 else ()
    described = pick(rng, (f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun} by its {word(rng)}.", ""))
    return ToolKind((name,), (described,), tuple(slots), questions, any_result, bare)


def schema_of(slot: Slot) -> dict[str, Any]:
    """The JSON schema of a slot."""
    return {"type": slot.type, **({"enum": list(slot.enum)} if slot.enum else {})}
