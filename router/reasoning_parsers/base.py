"""The interface of reasoning parsers, for those of other packages too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from baton.errors import InvalidRequest
from baton.structured_output.structural_tag import Format


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """`begins_open`: the reasoning begins with the answer, and `opening` may come before it; else it must. It ends with
    any of `ends`, of which the first is its own."""

    opening: str
    ends: Sequence[str]
    begins_open: bool


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of an answer: reasoning first, then content. `later`: what comes after both, if they take turns."""

    reasoning: str = ""
    content: str = ""
    later: Sequence[ReasoningDelta] = ()


class ReasoningParser(ABC):
    """Parts one answer's text, which comes in pieces: `feed` each, then `finish` once.

    What comes back, joined, depends only on the whole text. `prompt` is the chat as the template wrote it: its end
    says whether the template has opened the reasoning. Parsers run on the router's event loop.
    """

    keeps_special_tokens: ClassVar[bool] = False
    """Whether the marks may be special tokens of a tokenizer, which are usually not part of the text."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    @classmethod
    def continuing(cls, prompt: str, begun: str) -> Self | None:
        """For an answer that goes on from `begun`, with which the prompt ends: the beginning of its message, which the
        client wrote. None: its reasoning, if it has any, is behind it."""
        return cls(prompt)

    def format(self) -> Format | None:
        """The structural tag of the reasoning that may come before content that must match something; None: there is
        none, or its form is unknown. Before any text."""
        return None

    def marks(self) -> ReasoningMarks | None:
        """Between what the reasoning is, so that its tokens can be bounded; None: there will be none. Before any text.
        Raises InvalidRequest if that cannot be said."""
        text = "`thinking_token_budget` is not supported with this router's --reasoning-parser."
        raise InvalidRequest(text, "thinking_token_budget")

    def keep_to_format(self) -> None:  # noqa: B027 - most end it nowhere else
        """The answer has to match `format`, so its reasoning ends where that says, and nowhere else. Before any
        text."""

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta: ...

    @abstractmethod
    def finish(self) -> ReasoningDelta: ...
