"""Calls of custom tools: their input is the text that the model gave the function in their place, in whichever form."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from router.text.custom_input import ANY_INPUT
from router.tool_parsers import TOOL_PARSERS, CallArguments, CallStart, Content, CustomCalls, Piece, merge

TEXT = "a \"b\" \\n\n\tc = 'd' # é🙂 </x>"
ARGUMENTS = json.dumps({"input": TEXT}, ensure_ascii=False)
OBJECT = f'{{"name": "apply", "arguments": {ARGUMENTS}}}'
WRITTEN = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama3_json": OBJECT.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS]apply[ARGS]{ARGUMENTS}",
    "kimi_k2": f"<|tool_call_begin|>functions.apply:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
    "granite": f"<tool_call>[{OBJECT}]",
    "phi4_mini_json": f"functools[{OBJECT}]",
    "internlm": f"<|action_start|><|plugin|>\n{OBJECT}<|action_end|>",
    "gpt_oss": f"<|channel|>commentary to=functions.apply <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>apply\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>",
    "deepseek_v31": f"<｜tool▁call▁begin｜>apply<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    "deepseek_v32": '<｜DSML｜invoke name="apply">\n<｜DSML｜parameter name="input" string="true">'
    f"{TEXT}</｜DSML｜parameter>\n</｜DSML｜invoke>",
    "minimax_m2": f'<invoke name="apply"><parameter name="input">{TEXT}</parameter></invoke>',
    "qwen3_coder": f"<tool_call><function=apply><parameter=input>\n{TEXT}\n</parameter></function></tool_call>",
    "glm45": f"<tool_call>apply\n<arg_key>input</arg_key>\n<arg_value>{TEXT}</arg_value>\n</tool_call>",
    "gemma": f"<start_function_call>call:apply{{input:<escape>{TEXT}<escape>}}<end_function_call>",
    "gemma4": f'<|tool_call>call:apply{{input:<|"|>{TEXT}<|"|>}}<tool_call|>',
    "pythonic": f"[apply(input={TEXT!r})]",
    "olmo3": f"<function_calls>apply(input={TEXT!r})</function_calls>",
}


def read(name: str, text: str, cuts: Iterable[int] = ()) -> list[Piece]:
    parser, custom = TOOL_PARSERS[name]({"apply": ANY_INPUT.schema()}), CustomCalls(["apply"])
    found: list[Piece] = []
    start = 0
    for cut in [*cuts, len(text)]:
        found += custom.read(parser.feed(text[start:cut]))
        start = cut
    return found + custom.read(parser.finish())


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_every_parser_reads_the_input_as_it_comes(name: str) -> None:
    text = WRITTEN[name]
    whole = read(name, text)
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        start, given = merge(read(name, text, cuts))
        assert isinstance(start, CallStart)
        assert (start.name, start.is_custom) == ("apply", True)
        assert given == CallArguments(0, TEXT, is_custom=True), cuts
    assert len(whole) >= 2
    if name not in ("pythonic", "olmo3"):  # these wait for the call's end
        assert len(read(name, text, range(1, len(text)))) > len(TEXT) / 2


def input_of(arguments: str) -> str:
    custom, given = CustomCalls(["apply"]), ""
    custom.read([CallStart(0, "c", "apply")])
    for char in arguments:
        for piece in custom.read([CallArguments(0, char)]):
            assert isinstance(piece, CallArguments)
            assert piece.is_custom
            given += piece.text
    return given


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"input": ""}', ""),
        ('{ "\\u0069nput" :\n"a\\/b\\u00e9\\ud83d\\ude42\\b" }', "a/bé🙂\b"),
        ('{"input": "a", "why": "b"}', "a"),
        ('{"input": {"a": ["b", 1]}}', '{"a": ["b", 1]}'),
        ('{"input": 12}', "12"),
        ("{}", ""),
        ("{ }", ""),
        ('{"patch": "a\\n"}', '{"patch": "a\\n"}'),
        ('{"inputs": 1}', '{"inputs": 1}'),
        ('{"inp', ""),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00e', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\q"}', "a\\"),
    ],
)
def test_the_input_is_what_the_model_meant(arguments: str, given: str) -> None:
    assert input_of(arguments) == given


def test_calls_of_functions_stay_as_they_are() -> None:
    pieces: list[Piece] = [CallStart(0, "c", "f"), CallArguments(0, '{"input": "a"}'), Content("b")]
    custom = CustomCalls(["apply"])
    assert custom.read(pieces) == pieces
    both = custom.read([CallStart(1, "d", "apply"), CallArguments(1, '{"input": "a'), CallArguments(0, "}")])
    assert both[1:] == [CallArguments(1, "a", is_custom=True), CallArguments(0, "}")]
