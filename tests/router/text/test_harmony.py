"""Harmony: both parsers together give back the messages that were written, wherever the text is cut."""

import functools
import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.responses_api.output import Output
from router.reasoning_parsers import REASONING_PARSERS
from router.text.answer_reader import AnswerReader
from router.tool_parsers import TOOL_PARSERS, CallArguments, CallStart, Content, Part, Thought, merge

TEXTS = st.sampled_from(["Hm.", "1 < 2", "to=f <|", 'a "b"\n{}', "", " é "])
MESSAGES = st.one_of(
    st.tuples(st.sampled_from(["analysis", "commentary", "final"]), st.just(""), TEXTS),
    st.tuples(st.sampled_from(["analysis", "commentary"]), st.sampled_from(["f", "g"]), TEXTS),
)
TYPES = st.sampled_from(["", " json", " <|constrain|>json", "<|constrain|>json"])


def written(channel: str, name: str, text: str, content_type: str, role_has_recipient: bool) -> str:
    """A message as the format's guide has it. A recipient may be in the role or in the channel."""
    if not name:
        return f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>"
    to, body = f" to=functions.{name}", json.dumps({"text": text})
    role, rest = (to, "") if role_has_recipient else ("", to)
    return f"<|start|>assistant{role}<|channel|>{channel}{rest}{content_type}<|message|>{body}<|call|>"


def read(text: str, cuts: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and calls."""
    reasoning, content, calls = "", "", []
    for part in parts_of(text, cuts):
        match part:
            case Thought(more):
                reasoning += more
            case Content(more):
                content += more
            case CallStart(name=name):
                calls.append((name, ""))
            case CallArguments(index, more):
                calls[index] = (calls[index][0], calls[index][1] + more)
    return reasoning, content, calls


def parts_of(text: str, cuts: list[int]) -> list[Part]:
    """In their order. Calls have no id."""
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    tool = functools.partial(TOOL_PARSERS["gpt_oss"], {"f": {}, "g": {}})
    reader = AnswerReader(tool, REASONING_PARSERS["gpt_oss"](prompt), True)
    parts: list[Part] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.read(text[start:end], ended=end == len(text) and start == (cuts[-1] if cuts else 0))
    return [replace(part, id="") if isinstance(part, CallStart) else part for part in merge(parts)]


def test_parts_come_in_the_order_in_which_the_model_wrote_them():
    messages = [("commentary", "", "a"), ("x", "f", "b"), ("analysis", "", "c"), ("x", "g", "d"), ("final", "", "e")]
    text = "".join(written(channel, name, body, "", False) for channel, name, body in messages)
    text = text.removeprefix("<|start|>assistant")
    f, g = CallStart(0, "", "f"), CallStart(1, "", "g")
    expected = [Content("a"), f, CallArguments(0, '{"text": "b"}'), Thought("c"), g, CallArguments(1, '{"text": "d"}')]
    for cuts in ([], list(range(1, len(text))), *([cut] for cut in range(1, len(text)))):
        assert parts_of(text, cuts) == [*expected, Content("\ne")], cuts


def test_a_call_that_ends_with_the_tokens_of_what_comes_next_is_one_item():
    """Several tokens come at once for a client that reads slowly."""
    text = written("x", "f", "b", "", False) + written("analysis", "", "c", "", False)
    tool = functools.partial(TOOL_PARSERS["gpt_oss"], {"f": {}})
    reader = AnswerReader(tool, REASONING_PARSERS["gpt_oss"](""), True)
    output, cut = Output("resp_x", {}), text.index('"b"')
    for piece, ended in ((text[:cut], False), (text[cut:], True)):
        list(output.read(reader.read(piece, ended), []))
    list(output.end("completed"))
    assert [item["type"] for item in output.items] == ["function_call", "reasoning"]
    assert output.items[0]["arguments"] == '{"text": "b"}'


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_messages_come_back(data):
    messages = data.draw(st.lists(MESSAGES, min_size=1, max_size=5))
    text = "".join(written(c, name, t, data.draw(TYPES), data.draw(st.booleans())) for c, name, t in messages)
    text = text.removeprefix("<|start|>assistant")  # the template has written it
    if data.draw(st.booleans()):
        text = text.removesuffix("<|end|>").removesuffix("<|call|>")  # the last token is not always part of the text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text) - 1), max_size=20)))
    reasoning, content, calls = read(text, cuts)
    said = {channel: [t for c, name, t in messages if c == channel and not name and t] for channel, _, _ in messages}
    assert reasoning == "\n".join(said.get("analysis", []))
    shown = [t for c, name, t in messages if c != "analysis" and not name and t]
    assert content == "\n".join(shown)
    assert calls == [(name, json.dumps({"text": t})) for _, name, t in messages if name]


def test_no_call_goes_on_behind_reasoning():
    """Whatever the parser of calls is."""
    tool = functools.partial(TOOL_PARSERS["hermes"], {"f": {}})
    call, rest = '<tool_call>{"name": "f", "arguments": {"a": ', "1}}</tool_call>"
    text = call + written("analysis", "", "c", "", False) + written("final", "", rest, "", False)
    for cuts in ([], range(1, len(text))):
        reader, parts = AnswerReader(tool, REASONING_PARSERS["gpt_oss"](""), True), list[Part]()
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parts += reader.read(text[start:end], ended=end == len(text))
        assert merge(parts)[1:] == [CallArguments(0, '{"a": '), Thought("c"), Content(f"\n{rest}")]
