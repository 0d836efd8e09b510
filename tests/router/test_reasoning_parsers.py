"""Reasoning parsers: what models think is parted from what they say, whatever the pieces in which it comes."""

from collections.abc import Iterable

import pytest

from router.reasoning_parsers import REASONING_PARSERS

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
PLAIN = "<|im_start|>assistant\n"


def part(name: str, prompt: str, text: str, cuts: Iterable[int] = ()) -> tuple[str, str]:
    parser = REASONING_PARSERS[name](prompt)
    start, parts = 0, []
    for cut in [*cuts, len(text)]:
        parts.append(parser.feed(text[start:cut]))
        start = cut
    parts.append(parser.finish())
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
        ("deepseek_r1", PLAIN, "\nWell.</think>Yes.", "\nWell.", "Yes."),
        ("deepseek_r1", OPENED, "Well.</think>Yes.", "Well.", "Yes."),
        ("deepseek_r1", PLAIN, "<think>Well.</think>Yes.", "Well.", "Yes."),
        ("deepseek_r1", CLOSED, "Yes.", "", "Yes."),
        ("mistral", PLAIN, "[THINK]Well.[/THINK]Yes.", "Well.", "Yes."),
    ],
)
def test_reasoning_is_parted_from_content_wherever_it_is_cut(name, prompt, text, reasoning, content):
    assert part(name, prompt, text) == (reasoning, content)
    assert part(name, prompt, text, range(1, len(text))) == (reasoning, content)
    for cut in range(1, len(text)):
        assert part(name, prompt, text, [cut]) == (reasoning, content), cut


def test_text_waits_only_while_it_may_be_a_tag():
    parser = REASONING_PARSERS["qwen3"](OPENED)
    assert parser.feed("so </th").reasoning == "so "
    assert parser.feed("e").reasoning == "</the"
    assert parser.feed("</think>").reasoning == ""
    assert parser.feed("</th").content == "</th"
