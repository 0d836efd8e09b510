"""Harmony: both parsers together give back the messages that were written, wherever the text is cut."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from router.answer_reader import AnswerReader
from router.reasoning_parsers import REASONING_PARSERS
from router.tool_parsers import TOOL_PARSERS, CallArguments, CallStart, Content

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
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    reader = AnswerReader(TOOL_PARSERS["gpt_oss"]({"f": {}, "g": {}}), REASONING_PARSERS["gpt_oss"](prompt), True)
    reasoning, content, calls = "", "", []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts = reader.read(text[start:end], ended=end == len(text) and start == (cuts[-1] if cuts else 0))
        reasoning += parts.reasoning
        for piece in parts.pieces:
            match piece:
                case Content(more):
                    content += more
                case CallStart(name=name):
                    calls.append((name, ""))
                case CallArguments(index, more):
                    calls[index] = (calls[index][0], calls[index][1] + more)
    return reasoning, content, calls


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
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
