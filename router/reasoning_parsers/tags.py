"""Reasoning between two tags at the beginning of an answer."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Self

from baton.structured_output.structural_tag import Format
from router.reasoning_parsers.base import ReasoningDelta, ReasoningMarks, ReasoningParser
from router.tool_parsers.source import any_of, num_held

_END_CHARS = 64
"""Of the prompt, where the template may have written a tag."""
_BLANKS_AFTER = r"[ \n]{0,4}"
"""Between reasoning and content that must match something."""


class _State(Enum):
    """START -> REASONING or CONTENT; REASONING -> CONTENT."""

    START = 0
    REASONING = 1
    CONTENT = 2


class TagParser(ReasoningParser):
    """The template may have written the opening tag, or both. Without the closing one, all is reasoning."""

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    also_closing: ClassVar[tuple[str, ...]] = ()
    """Marks that end the reasoning, too, and belong to the content."""
    assumes_reasoning: ClassVar[bool] = False
    """Whether an answer without the opening tag begins with reasoning too."""

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        end = prompt[-_END_CHARS:].rstrip()
        self._begins_open = end.endswith(self.opening) or (self.assumes_reasoning and not end.endswith(self.closing))
        self._ends = (self.closing, *self.also_closing)
        self._end = any_of(self._ends)
        self._state = _State.START
        self._held = ""
        self._blanks: list[str] = []

    @classmethod
    def continuing(cls, prompt: str, begun: str) -> Self | None:
        if not begun.strip():
            return cls(prompt)
        if begun.rfind(cls.opening) <= max(map(begun.rfind, (cls.closing, *cls.also_closing))):
            return None
        parser = cls(prompt)
        parser._begins_open = True
        return parser

    def format(self) -> Format | None:
        if self._begins_open:
            return self._thought("")
        if self._is_closed:
            return None
        return {"type": "or", "elements": [self._thought(self.opening), {"type": "const_string", "value": ""}]}

    def marks(self) -> ReasoningMarks | None:
        return None if self._is_closed else ReasoningMarks(self.opening, self._ends, self._begins_open)

    @property
    def _is_closed(self) -> bool:
        """Whether the template has written both tags."""
        return not self._begins_open and self.prompt[-_END_CHARS:].rstrip().endswith(self.closing)

    def keep_to_format(self) -> None:
        self._ends = (self.closing,)
        self._end = any_of(self._ends)

    def feed(self, text: str) -> ReasoningDelta:
        if self._state is _State.CONTENT:
            return ReasoningDelta(content=text)
        if self._state is _State.START:
            text = self._start(text)
        if self._state is _State.START:
            return ReasoningDelta()
        return self._reasoning(text) if self._state is _State.REASONING else ReasoningDelta(content=text)

    def finish(self) -> ReasoningDelta:
        rest = "".join([*self._blanks, self._held])
        in_reasoning = self._state is _State.REASONING or (self._state is _State.START and self._begins_open)
        return ReasoningDelta(reasoning=rest) if in_reasoning else ReasoningDelta(content=rest)

    def _thought(self, begin: str) -> Format:
        any_text = {"type": "any_text"}
        tag = {"type": "tag", "begin": begin, "content": any_text, "end": self.closing}
        return {"type": "sequence", "elements": [tag, {"type": "regex", "pattern": _BLANKS_AFTER}]}

    def _start(self, text: str) -> str:
        """Look for the opening tag behind blanks. Returns what comes after the decision."""
        if not self._held:
            body = text.lstrip()
            self._blanks.append(text[: len(text) - len(body)])
            text = body
        text = self._held + text
        self._held = ""
        if text.startswith(self.opening):
            self._state, self._blanks = _State.REASONING, []
            return text.removeprefix(self.opening)
        if self.opening.startswith(text):  # nothing, too
            self._held = text
            return ""
        self._state = _State.REASONING if self._begins_open else _State.CONTENT
        blanks, self._blanks = "".join(self._blanks), []
        return blanks + text

    def _reasoning(self, text: str) -> ReasoningDelta:
        text = self._held + text
        self._held = ""
        if end := self._end.search(text):
            self._state = _State.CONTENT
            return ReasoningDelta(text[: end.start()], text[end.start() :].removeprefix(self.closing))
        held = num_held(text, self._ends)
        self._held = text[len(text) - held :]
        return ReasoningDelta(reasoning=text[: len(text) - held])


class DeepSeekV3Parser(TagParser):
    """DeepSeek V3.1 and its like: with thinking turned off, the template writes both tags or none."""


class Qwen3Parser(DeepSeekV3Parser):
    """Qwen3.5 may call a tool without the closing tag before it. The mark alone does not end the reasoning, because
    models think about it, too."""

    also_closing = ("<tool_call>{", "<tool_call>\n{", "<tool_call><function=", "<tool_call>\n<function=")


class Glm45Parser(DeepSeekV3Parser):
    """A call may come without the closing tag before it."""

    also_closing = ("<tool_call>",)


class DeepSeekR1Parser(TagParser):
    """Some of DeepSeek-R1's templates leave the opening tag to a model that may leave it out."""

    assumes_reasoning = True


class MistralParser(TagParser):
    """Magistral, from the version on whose tags are special tokens."""

    opening = "[THINK]"
    closing = "[/THINK]"
    keeps_special_tokens = True


class KimiK2Parser(DeepSeekR1Parser):
    """A call may come without the closing tag before it."""

    also_closing = ("<|tool_calls_section_begin|>",)
    keeps_special_tokens = True


class Gemma4Parser(TagParser):
    opening = "<|channel>thought"
    closing = "<channel|>"
    keeps_special_tokens = True


class GraniteParser(TagParser):
    """Granite 3.2 and 3.3."""

    opening = "Here is my thought process:"
    closing = "Here is my response:"
