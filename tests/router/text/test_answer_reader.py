"""Both parsers together: the parts of an answer are the same, and in the same order, wherever its text is cut."""

import functools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from router.reasoning_parsers import REASONING_PARSERS
from router.reasoning_parsers.tags import Qwen3Parser
from router.text.answer_reader import AnswerReader, AnswerReading, Parsers
from router.tool_parsers import TOOL_PARSERS, CallListParser, CallStart, Content, Part, Thought, ToolParser, merge
from tests.router.text.test_tool_parsers import CASES
from tests.router.tool_outputs import TOOLS

KINDS: dict[str, type[ToolParser]] = {**TOOL_PARSERS, "granite": CallListParser}
MARKS = {
    "gemma4": ["<|channel>thought", "<channel|>"],
    "gpt_oss": ["<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"],
    "granite": ["Here is my thought process:", "Here is my response:"],
    "kimi_k2": ["<think>", "</think>", "<|tool_calls_section_begin|>"],
    "mistral": ["[THINK]", "[/THINK]"],
}
USUAL_MARKS = ["<think>", "</think>"]


def parts_of(tool: str, reasoning: str, prompt: str, pieces: list[str]) -> list[Part]:
    """Without the ids of calls."""
    reader = AnswerReader(functools.partial(KINDS[tool], TOOLS), REASONING_PARSERS[reasoning](prompt), True)
    parts = [part for i, piece in enumerate(pieces) for part in reader.read(piece, i == len(pieces) - 1)]
    return [replace(part, id="") if isinstance(part, CallStart) else part for part in merge(parts)]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_an_answer_in_any_pieces_reads_like_the_whole(data):
    tool = data.draw(st.sampled_from(sorted(KINDS)))
    reasoning = data.draw(st.sampled_from(sorted(REASONING_PARSERS)))
    marks = MARKS.get(reasoning, USUAL_MARKS)
    texts = [case.text for case in CASES if case.parser == tool and len(case.text) < 400]
    begun = st.builds(lambda whole, size: whole[:size], st.sampled_from(texts), st.integers(1, 400))
    part = st.one_of(st.sampled_from([*marks, "é🙂 ", "\n"]), st.sampled_from(texts), begun)
    text = "".join(data.draw(st.lists(part, max_size=7)))
    prompt = data.draw(st.sampled_from(["<|im_start|>assistant\n", f"{marks[0]}\n", "".join(marks[:2])]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parts_of(tool, reasoning, prompt, [text])
    assert parts_of(tool, reasoning, prompt, pieces) == whole
    assert parts_of(tool, reasoning, prompt, list(text) or [""]) == whole


def test_each_answer_has_a_reasoning_parser_and_no_other_is_made():
    made = []

    class Counted(Qwen3Parser):
        def __init__(self, prompt):
            super().__init__(prompt)
            made.append(self)

    reading = AnswerReading(Parsers(reasoning=Counted), "p<think>", {})
    assert reading.is_needed
    assert not reading.keeps_special_tokens
    assert reading.reasoning_format()
    first, second = reading.reader(), reading.reader()
    assert first.read("Hm.", False) == second.read("Hm.", False) == [Thought("Hm.")]
    assert first.read("</think>Yes", True) == [Content("Yes")]
    assert second.read(" No", True) == [Thought(" No")]
    assert len(made) == 2


def test_calls_that_the_model_gives_one_id_get_ids_of_their_own():
    """Kimi K2 counts its calls, and may count wrong."""
    ids = ("functions.add:0", "functions.add:1", "functions.add:1", "functions.multiply:0", "functions.add:2")
    begin, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    text = "".join(f'{begin}{call_id}{arguments}{{"a": 1}}{end}' for call_id in ids)
    for pieces in ([text], list(text)):
        reader = AnswerReader(functools.partial(TOOL_PARSERS["kimi_k2"], TOOLS), None, True)
        parts = [part for piece in pieces for part in reader.read(piece, False)] + reader.read("", True)
        starts = [part for part in parts if isinstance(part, CallStart)]
        assert [start.id for start in starts] == [*ids[:2], "functions.add:2", ids[3], "functions.add:4"]
        assert [start.index for start in starts] == [0, 1, 2, 3, 4]
