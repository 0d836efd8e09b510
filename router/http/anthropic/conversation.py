"""Conversations in the form for a chat template, which is that of OpenAI's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from router.http.anthropic.content import Block, Text, Thinking, ToolResult, ToolUse

Turn = dict[str, Any]


def turns_of(messages: Iterable[tuple[str, tuple[Block, ...]]]) -> list[Turn]:
    """The messages for a chat template, from roles and contents. Consecutive ones of one role become one, as Anthropic
    has it: many templates insist that roles alternate. Results of tools are messages of their own."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for role, blocks in messages:
        names.update((block.id, block.name) for block in blocks if isinstance(block, ToolUse))
        for turn in _turns(role, blocks, names):
            if turns and turn["role"] == turns[-1]["role"] != "tool":
                _merge(turns[-1], turn)
            else:
                turns.append(turn)
    return turns


def text_of(blocks: Iterable[Block]) -> str:
    """Blocks become lines."""
    return "\n".join(block.text for block in blocks if isinstance(block, Text))


def _turns(role: str, blocks: tuple[Block, ...], names: Mapping[str, str]) -> Iterator[Turn]:
    """names: those of tools, by the ids of their calls."""
    others: list[Block] = []
    for block in blocks:
        if not isinstance(block, ToolResult):
            others.append(block)
            continue
        if others:
            yield _turn(role, others)
            others = []
        name = names.get(block.tool_use_id)
        named = {} if name is None else {"name": name}
        yield {"role": "tool", "content": block.text, "tool_call_id": block.tool_use_id, **named}
    if others or not blocks:
        yield _turn(role, others)


def _turn(role: str, blocks: list[Block]) -> Turn:
    turn: Turn = {"role": role, "content": text_of(blocks)}
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUse)]:
        turn["tool_calls"] = calls
    if thoughts := [block.text for block in blocks if isinstance(block, Thinking)]:
        turn |= {"reasoning": "\n".join(thoughts), "reasoning_content": "\n".join(thoughts)}
    return turn


def _call(block: ToolUse) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _merge(turn: Turn, later: Turn) -> None:
    turn["content"] = "\n".join(filter(None, (turn["content"], later["content"])))
    if calls := [*turn.get("tool_calls", ()), *later.get("tool_calls", ())]:
        turn["tool_calls"] = calls
    for name in ("reasoning", "reasoning_content"):
        if thoughts := [given[name] for given in (turn, later) if name in given]:
            turn[name] = "\n".join(thoughts)
