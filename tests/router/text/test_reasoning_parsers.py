"""Reasoning parsers: what models think is parted from what they say, whatever the pieces in which it comes."""

from collections.abc import Iterable

import pytest

from router.reasoning_parsers import REASONING_PARSERS, ReasoningDelta

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"
HARMONY = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
TOOL_CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'


START = "<|start|>assistant<|channel|>"
PREAMBLE = f"{START}commentary<|message|>c<|end|>"


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|>"


def final(text: str) -> str:
    return f"{START}final<|message|>{text}"


def in_order(delta: ReasoningDelta) -> list[ReasoningDelta]:
    return [delta, *delta.later]


def part(name: str, prompt: str, text: str, cuts: Iterable[int] = ()) -> tuple[str, str]:
    parser = REASONING_PARSERS[name](prompt)
    start, parts = 0, []
    for cut in [*cuts, len(text)]:
        parts += in_order(parser.feed(text[start:cut]))
        start = cut
    parts += in_order(parser.finish())
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", PLAIN, "<think>\nWell.\n</think>\n\nYes.", "\nWell.\n", "\n\nYes."),
        ("qwen3", PLAIN, "\n<think>a</think>b</think>c", "a", "b</think>c"),
        ("qwen3", OPENED, "Well.</think>Yes.", "Well.", "Yes."),
        ("qwen3", OPENED, "<think>again</think>Yes.", "again", "Yes."),
        ("qwen3", OPENED, " 1 < 2, </thin", " 1 < 2, </thin", ""),
        ("qwen3", OPENED, "<thi", "<thi", ""),
        ("qwen3", CLOSED, "Yes </think> no.", "", "Yes </think> no."),
        ("qwen3", PLAIN, " <b>Yes</b> <think>no</think>", "", " <b>Yes</b> <think>no</think>"),
        ("qwen3", PLAIN, " <thi", "", " <thi"),
        ("qwen3", PLAIN, "", "", ""),
        # a call without the closing tag before it, as Qwen3.5 writes it; and thoughts about the mark of one
        (
            "qwen3",
            OPENED,
            "Hm.\n\n<tool_call>\n<function=f>\n</function>",
            "Hm.\n\n",
            "<tool_call>\n<function=f>\n</function>",
        ),
        ("qwen3", PLAIN, '<think>Hm.<tool_call>\n{"name": "f"', "Hm.", '<tool_call>\n{"name": "f"'),
        ("qwen3", OPENED, "A <tool_call>\n is a tag.</think>Yes.", "A <tool_call>\n is a tag.", "Yes."),
        ("qwen3", OPENED, "Hm. <tool_call>\n", "Hm. <tool_call>\n", ""),
        ("deepseek_r1", PLAIN, "\nWell.</think>Yes.", "\nWell.", "Yes."),
        ("deepseek_r1", OPENED, "Well.</think>Yes.", "Well.", "Yes."),
        ("deepseek_r1", PLAIN, "<think>Well.</think>Yes.", "Well.", "Yes."),
        ("deepseek_r1", CLOSED, "Yes.", "", "Yes."),
        ("mistral", PLAIN, "[THINK]Well.[/THINK]Yes.", "Well.", "Yes."),
        ("kimi_k2", PLAIN, "<think>Well.</think>Yes.", "Well.", "Yes."),
        ("kimi_k2", PLAIN, "Well.<|tool_calls_section_begin|>f", "Well.", "<|tool_calls_section_begin|>f"),
        ("kimi_k2", CLOSED, "Yes.", "", "Yes."),
        ("minimax_m2", "]~b]ai\n<think>\n", "1+1=2, right?</think>Yes.", "1+1=2, right?", "Yes."),
        ("deepseek_v3", "<｜Assistant｜><think>", "Hm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_v3", "<｜Assistant｜></think>", "Yes.", "", "Yes."),
        ("glm45", "<|assistant|>", "\n<think>Hm.</think>\nYes.", "Hm.", "\nYes."),
        ("glm45", "<|assistant|><think>", "Hm.<tool_call>f\n</tool_call>", "Hm.", "<tool_call>f\n</tool_call>"),
        ("olmo3", OPENED, "Hm.</think>Yes.", "Hm.", "Yes."),
        ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.<channel|>Yes.", "\nHm.", "Yes."),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
        ("granite", PLAIN, "Here is my thought process: a Here is b Here is my response: c", " a Here is b ", " c"),
        ("granite", PLAIN, "Here is my thought failure", "", "Here is my thought failure"),
        # the guide to the format
        ("gpt_oss", HARMONY, f"{analysis('2 + 2?')}{final('4.')}<|return|>", "2 + 2?", "4."),
        ("gpt_oss", HARMONY, analysis("Use f.") + TOOL_CALL, "Use f.", TOOL_CALL),
        (
            "gpt_oss",
            HARMONY,
            f"{analysis('a')}{START}analysis<|message|>b<|end|>{PREAMBLE}{final('d')}",
            "a\nb",
            "c\nd",
        ),
        ("gpt_oss", HARMONY, f"{TOOL_CALL}{final('Done.')}", "", f"{TOOL_CALL}Done."),
        (
            "gpt_oss",
            HARMONY,
            " to=functions.f<|channel|>commentary json<|message|>{}",
            "",
            " to=functions.f<|channel|>commentary json<|message|>{}",
        ),
        # what the tests of openai-harmony expect
        ("gpt_oss", HARMONY, "<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}"),
        (
            "gpt_oss",
            HARMONY,
            f"I must refuse<|end|>{START}analysis<|message|>We must<|end|>{final('Sorry')}",
            "We must",
            "I must refuse\nSorry",
        ),
        (
            "gpt_oss",
            HARMONY,
            f"<|channel|>analysis I must<|end|>{START}analysis<|message|>We must<|end|>{final('Sorry')}",
            "I must\nWe must",
            "Sorry",
        ),
        # cut off, or without marks
        ("gpt_oss", HARMONY, "<|channel|>analysis<|message|>Hm <|en", "Hm <|en", ""),
        ("gpt_oss", HARMONY, f"<|channel|>analysis<|message|>Hm.{final('Yes')}", "Hm.", "Yes"),
        ("gpt_oss", HARMONY, f"{analysis('Hm.')}<|start|>assistant<|chan", "Hm.", "<|chan"),
        ("gpt_oss", HARMONY, "Just a <b> text to=f", "", "Just a <b> text to=f"),
        ("gpt_oss", HARMONY, "", "", ""),
        # a prompt that has begun a message
        ("gpt_oss", f"{HARMONY}<|channel|>analysis<|message|>So", f" a<|end|>{final('b')}", " a", "b"),
        ("gpt_oss", f"{HARMONY}<|channel|>final<|message|>So", " it is", "", " it is"),
    ],
)
def test_reasoning_is_parted_from_content_wherever_it_is_cut(name, prompt, text, reasoning, content):
    assert part(name, prompt, text) == (reasoning, content)
    assert part(name, prompt, text, range(1, len(text))) == (reasoning, content)
    for cut in range(1, len(text)):
        assert part(name, prompt, text, [cut]) == (reasoning, content), cut


@pytest.mark.parametrize(
    ("name", "begun", "text", "reasoning", "content"),
    [
        ("deepseek_r1", "The answer", " is 4.", "", " is 4."),
        ("deepseek_r1", "<think>Hm.</think>The answer", " is 4.", "", " is 4."),
        ("qwen3", "<think>\nLet me", " see.</think>4.", " see.", "4."),
        ("qwen3", "</think> <think>Or", "", "", ""),
        ("kimi_k2", "<think>Hm.<|tool_calls_section_begin|>", "f", "", "f"),
    ],
)
def test_an_answer_that_goes_on_knows_whether_it_reasons(name, begun, text, reasoning, content):
    parser = REASONING_PARSERS[name].continuing(f"{PLAIN}{begun}", begun)
    if parser is None:
        assert (reasoning, content) == ("", text)
        return
    first, rest = parser.feed(text), parser.finish()
    assert (first.reasoning + rest.reasoning, first.content + rest.content) == (reasoning, content)
    form = parser.format()
    assert form is not None
    assert form["elements"][0]["begin"] == ""


def test_an_answer_that_goes_on_from_nothing_begins():
    parser = REASONING_PARSERS["qwen3"].continuing(PLAIN, " ")
    assert parser is not None
    assert parser.feed("<think>a</think>b") == ReasoningDelta("a", "b")


def test_a_message_of_harmony_goes_on():
    prompt = f"{HARMONY}<|channel|>final<|message|>So"
    assert REASONING_PARSERS["gpt_oss"].continuing(prompt, "So").feed(" it is") == ReasoningDelta(content=" it is")


def test_text_waits_only_while_it_may_be_a_tag():
    parser = REASONING_PARSERS["qwen3"](OPENED)
    assert parser.feed("so </th").reasoning == "so "
    assert parser.feed("e").reasoning == "</the"
    assert parser.feed("</think>").reasoning == ""
    assert parser.feed("</th").content == "</th"


def test_messages_of_harmony_go_out_as_they_come():
    parser = REASONING_PARSERS["gpt_oss"](HARMONY)
    assert parser.feed("<|channel|>analysis<|message|>One").reasoning == "One"
    assert parser.feed(f" two<|end|>{START}final<|message|>Three").content == "Three"
    assert parser.feed(f" four<|end|>{START}commentary to=functions.f <|con").content == " four"
