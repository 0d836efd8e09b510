"""A prompt, its answer, and the check of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
CheckKind = Literal["exact", "json", "story", "calls"]


@dataclass(frozen=True)
class Sample:
    """One prompt and its right answer.

    A chat sample ends with a user message, or a tool's result; a plain one is text for the completions endpoint, and
    its answer starts with the space that joins it to the prompt.
    """

    task: str
    prompt: str
    answer: str
    kind: CheckKind = "exact"
    history: tuple[Message, ...] = ()  # the messages before the last one
    mentions: tuple[str, ...] = ()  # what a story must mention
    plain: bool = False
    tools: tuple[dict[str, Any], ...] = ()  # that the model may call, in the form of OpenAI's API
    role: str = "user"  # of the last message: "tool" for a result

    @property
    def messages(self) -> list[Message]:
        """The chat messages to send: the history, then the prompt as the last turn."""
        if self.plain:
            raise ValueError(f"{self.task} is a plain completion: send .prompt")
        return [*self.history, {"role": self.role, "content": self.prompt}]

    def check(self, text: str) -> bool:
        """Whether `text`, a reply without special tokens, is a right answer."""
        if self.kind == "json":
            return _same_json(text, self.answer)
        if self.kind == "calls":
            return calls_in(text) == calls_in(self.answer)
        if self.kind == "story":
            return _good_story(text, self.mentions)
        return text.strip() == self.answer.strip()


def calls_in(text: str) -> list[Any] | None:
    """The tool calls of an answer that has nothing else; None: it has."""
    rest, calls = text.strip(), []
    while rest:
        before, begin, rest = rest.partition("<tool_call>")
        call, end, rest = rest.partition("</tool_call>")
        try:
            calls.append(json.loads(call))
        except ValueError:
            return None
        if before.strip() or not begin or not end:
            return None
    return calls


def _same_json(text: str, expected: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(expected))
    except ValueError:
        return False


def _good_story(text: str, mentions: Sequence[str]) -> bool:
    """At least 25 words in complete sentences, including every wanted word, and no sentence twice."""
    text = text.strip()
    sentences = [part.strip() for part in re.split(r"[.!?]", text) if part.strip()]
    whole = text[-1:] in {".", "!", "?"} and len(text.split()) >= 25
    return whole and len(sentences) == len(set(sentences)) and all(word in text for word in mentions)
