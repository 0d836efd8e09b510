"""The interface of tool parsers, for those of other packages too."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from router.tool_parsers.call_form import CallForm
from router.tool_parsers.pieces import Piece

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by the tool's name. Clients wrote it: it may be any object."""


class ToolParser(ABC):
    """Finds the calls in one answer's text, which comes in pieces: `feed` each, then `finish` once.

    The pieces that come back, joined, depend only on the whole text. Text that is not a call, or calls no known tool,
    is content. Work and memory must be linear in the text: parsers run on the router's event loop.
    """

    keeps_special_tokens: ClassVar[bool] = False
    """Whether the marks of a call may be special tokens of a tokenizer, which are usually not part of the text."""
    form: ClassVar[CallForm | None] = None
    """How constrained answers write calls, a form that this parser reads; None: as the JSON list of CallListParser."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    @abstractmethod
    def feed(self, text: str) -> list[Piece]: ...

    @abstractmethod
    def finish(self) -> list[Piece]: ...

    def new_id(self) -> str:
        """An id for the next call."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    def id_of(self, prompt: str, name: str, index: int) -> str:
        """An id for call `index` of an answer to `prompt` that writes its calls as a JSON list: one that the model's
        template takes."""
        return self.new_id()
