"""What a parser makes of an answer's text: content, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the client's user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. `index` counts the answer's calls from 0; `is_custom`: of a custom tool (see CustomCalls)."""

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, which are the text of a JSON object; of the input, if `is_custom`."""

    index: int
    text: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning, which the reasoning parser takes out of the text before a tool parser reads it."""

    text: str


Piece = Content | CallStart | CallArguments
Part = Piece | Thought


def merge(pieces: Iterable[Part]) -> list[Part]:
    """The same with neighbours joined where they belong together."""
    groups: list[tuple[Part, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            groups.append((piece, []))
        elif groups and _same_text(groups[-1][0], piece):
            groups[-1][1].append(piece.text)
        else:
            groups.append((piece, [piece.text]))
    return [_joined(first, texts) for first, texts in groups]


def _same_text(left: Part, right: Part) -> bool:
    if isinstance(left, CallArguments) and isinstance(right, CallArguments):
        return left.index == right.index
    return type(left) is type(right) and isinstance(left, Content | Thought)


def _joined(first: Part, texts: list[str]) -> Part:
    match first:
        case Thought():
            return Thought("".join(texts))
        case Content():
            return Content("".join(texts))
        case CallArguments():
            return replace(first, text="".join(texts))
    return first
