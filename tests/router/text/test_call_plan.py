"""Answers that must call tools: what their text has to match, and how it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from router.reasoning_parsers import REASONING_PARSERS
from router.text.answer_reader import AnswerReading, Parsers
from router.text.call_plan import CallMode, CallPlan, OfferedTool, plan_calls
from router.text.constraints import constrained, format_of
from router.text.generation_request import GenerationRequest
from router.tool_parsers import TOOL_PARSERS, CallStart
from tests.router.matching import matches
from tests.router.text.test_tool_parsers import joined

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Köln", '"x"']}},
}
TOOLS = [OfferedTool("look", CITY, strict=True), OfferedTool("add-2", {})]
LOOK, ADD = '{"city": "Köln"}', '{"a": [1, {"b": "]}"}]}'
LIST = f'[{{"name": "look", "parameters": {LOOK}}}, {{"name": "add-2", "parameters": {ADD}}}]'
HERMES = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in (("look", LOOK), ("add-2", ADD))
)
LLAMA = f'{{"name": "look", "parameters": {LOOK}}}; {{"name": "add-2", "parameters": {ADD}}}'
_NAMES: list[str | None] = [None, *TOOL_PARSERS]
PHI = "functools" + LIST.replace("parameters", "arguments")
TEXTS = {**dict.fromkeys(_NAMES, LIST), "hermes": HERMES, "llama3_json": LLAMA, "phi4_mini_json": PHI}
JSON_CITY = StructuredOutput(StructuredKind.JSON, json.dumps(CITY))


def parsers(tool: str | None, reasoning: str | None = None, auto: bool = False) -> Parsers:
    return Parsers(
        TOOL_PARSERS[tool] if tool else None, REASONING_PARSERS[reasoning] if reasoning else None, auto_tool_choice=auto
    )


def constraint(
    plan: CallPlan, reading: AnswerReading | None, asked: StructuredOutput | None = None
) -> StructuredOutput | None:
    sampling = {"structured_outputs": asked} if asked else {}
    wanted = constrained(GenerationRequest(request_id="r", prompts=("p",), sampling=sampling), plan, reading)
    found: StructuredOutput | None = wanted.sampling.get("structured_outputs")
    return found


def forced(
    parsers: Parsers, mode: CallMode = CallMode.REQUIRED, parallel: bool = True, prompt: str = "p"
) -> tuple[StructuredOutput, AnswerReading]:
    plan = plan_calls(parsers, TOOLS if mode is not CallMode.ONE else TOOLS[:1], mode, parallel)
    reading = plan.reading(parsers, prompt, parallel)
    structured = constraint(plan, reading)
    assert reading is not None
    assert structured is not None
    return structured, reading


@pytest.mark.parametrize("name", TEXTS)
def test_required_calls_are_written_and_read_in_one_form(name: str | None) -> None:
    structured, reading = forced(parsers(name))
    text = TEXTS[name]
    assert matches(structured, text)
    for bad in ("", "Hello", text[:-1], text + " ", text.replace("Köln", "Bonn"), text.replace("look", "cook")):
        assert not matches(structured, bad), bad
    expected = ("", [("look", LOOK), ("add-2", ADD)])
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        reader, pieces, start = reading.reader(), [], 0
        for cut in (*cuts, len(text)):
            pieces += reader.read(text[start:cut], cut == len(text))
            start = cut
        assert joined(pieces) == expected


def test_ids_of_required_calls_are_of_the_form_that_the_models_templates_take() -> None:
    found = {}
    for name in ("mistral", "kimi_k2", None):
        _, reading = forced(parsers(name), prompt="<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}")
        parts = reading.reader().read(LIST, True)
        found[name] = [part.id for part in parts if isinstance(part, CallStart)]
    assert found["kimi_k2"] == ["functions.look:1", "functions.add-2:2"]
    assert [(len(call_id), call_id.isalnum()) for call_id in found["mistral"]] == [(9, True)] * 2
    assert all(call_id.startswith("chatcmpl-tool-") for call_id in found[None])


@pytest.mark.parametrize("name", [None, "hermes", "llama3_json", "mistral"])
def test_one_call_may_be_all_that_is_allowed(name: str | None) -> None:
    first = {"hermes": HERMES.partition("\n<tool_call>")[0], "llama3_json": LLAMA.partition(";")[0]}
    one = first.get(name or "", LIST.partition(", {")[0] + "]")
    for mode, parallel in ((CallMode.ONE, True), (CallMode.REQUIRED, False)):
        structured, _ = forced(parsers(name), mode, parallel)
        assert matches(structured, one)
        assert not matches(structured, TEXTS[name])


@pytest.mark.parametrize(
    ("reasoning", "prompt", "before"),
    [
        ("qwen3", "p", ["", "<think>{[<tool_call> </think>\n\n"]),
        ("qwen3", "p<think>\n", ["Hm. [{ </think>\n\n", "</think>"]),
        ("qwen3", "p<think>\n\n</think>\n\n", [""]),
        ("deepseek_r1", "p", ["<think>Hm.</think>", "Hm.</think>\n"]),
        ("mistral", "p", ["", "[THINK]a[/THINK]"]),
    ],
)
def test_reasoning_is_free(reasoning: str, prompt: str, before: list[str]) -> None:
    structured, reading = forced(parsers("hermes", reasoning), prompt=prompt)
    for thought in before:
        assert matches(structured, thought + HERMES), thought
        assert not matches(structured, thought + "Hello")
        parts = reading.reader().read(thought + HERMES, True)
        assert joined(parts)[1][0] == ("look", LOOK)
    assert matches(structured, HERMES) is ("" in before)


STRICT_GOOD = ["", "I think <tool_", f"So:\n{HERMES}\nDone.", HERMES]


def test_strict_tools_constrain_calls_within_text() -> None:
    plan = plan_calls(parsers("hermes", auto=True), TOOLS, CallMode.AUTO)
    structured = constraint(plan, None)
    assert structured is not None
    for text in STRICT_GOOD:
        assert matches(structured, text), text
    wrong = [HERMES.replace("Köln", "Bonn"), HERMES.replace("look", "cook")]
    for text in ("<tool_call>", *wrong, HERMES + "<tool_call>x"):
        assert not matches(structured, text), text
    lax = plan_calls(parsers("hermes", auto=True), TOOLS[1:], CallMode.AUTO)
    for plan in (lax, plan_calls(parsers("mistral", auto=True), TOOLS, CallMode.AUTO), CallPlan()):
        assert constraint(plan, None) is None


def test_an_answer_that_must_be_json_may_call_instead() -> None:
    plan = plan_calls(parsers("hermes", auto=True), TOOLS, CallMode.AUTO)
    structured = constraint(plan, None, JSON_CITY)
    assert structured is not None
    assert matches(structured, LOOK)
    assert matches(structured, HERMES)
    assert not matches(structured, f"Hello {HERMES}")
    regex = StructuredOutput(StructuredKind.REGEX, ".*")
    assert constraint(plan, None, regex) is regex
    for name in ("llama3_json", "mistral"):
        without = plan_calls(parsers(name, auto=True), TOOLS, CallMode.AUTO)
        assert constraint(without, None, JSON_CITY) is JSON_CITY


@pytest.mark.parametrize(
    ("asked", "good"),
    [
        (JSON_CITY, LOOK),
        (StructuredOutput(StructuredKind.JSON_OBJECT), '{"a": 1}'),
        (StructuredOutput(StructuredKind.REGEX, "a/b+"), "a/bb"),
        (StructuredOutput(StructuredKind.CHOICE, '["yes", "no"]'), "no"),
        (StructuredOutput(StructuredKind.GRAMMAR, 'start: "x" start | "y"'), "xxy"),
        (StructuredOutput(StructuredKind.STRUCTURAL_TAG, '{"format": {"type": "regex", "pattern": "a"}}'), "a"),
    ],
)
def test_every_kind_of_constraint_comes_after_reasoning(asked: StructuredOutput, good: str) -> None:
    reading = AnswerReading(parsers(None, "qwen3"), "p<think>", {})
    structured = constraint(CallPlan(), reading, asked)
    assert structured is not None
    assert matches(structured, f"Hm.</think>\n\n{good}")
    assert not matches(structured, good)
    assert not matches(structured, f"Hm.</think>{good}!")
    closed = AnswerReading(parsers(None, "qwen3"), "p<think></think>", {})
    assert constraint(CallPlan(), closed, asked) is asked


def test_contradictions_are_named() -> None:
    plan = plan_calls(Parsers(), TOOLS, CallMode.REQUIRED)
    with pytest.raises(InvalidRequest, match="exclude each other") as refused:
        constraint(plan, None, JSON_CITY)
    assert refused.value.param == "tool_choice"
    for mode in (CallMode.REQUIRED, CallMode.ONE):
        with pytest.raises(InvalidRequest, match="tool `f` must be a schema of type object"):
            plan_calls(Parsers(), [OfferedTool("f", {"type": "string"})], mode)
    with pytest.raises(InvalidRequest, match="json is not JSON"):
        format_of(StructuredOutput(StructuredKind.JSON, "{"))
    nullable = [OfferedTool("f", {"type": ["object", "null"]})]
    structured = constraint(plan_calls(Parsers(), nullable, CallMode.ONE), None)
    assert structured is not None
    assert not matches(structured, '[{"name": "f", "parameters": null}]')
