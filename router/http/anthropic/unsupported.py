"""Fields of Anthropic's API, and of the chat route, that would change an answer in a way that is not served here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.http.schemas import ChatRequest
from router.http.unsupported import Harmless, is_empty, never


def _clears_nothing(value: Any) -> bool:
    """Whether all edits of `context_management` leave the conversation as it is: Claude Code has all thinking kept, as
    it is here."""
    if not isinstance(value, dict) or value.keys() - {"edits"}:
        return not value
    edits = value.get("edits") or ()
    return isinstance(edits, list | tuple) and all(edit in _KEEP_THINKING for edit in edits)


_KEEP_THINKING = tuple({"type": "clear_thinking_20251015", "keep": every} for every in ("all", {"type": "all"}))

IN_CONVERSATIONS: Mapping[str, Harmless] = {
    "container": is_empty,
    "context_management": _clears_nothing,
    "mcp_servers": is_empty,
    "output_format": is_empty,
}
"""Those that would change the prompt, and so also its number of tokens."""

IN_MESSAGES: Mapping[str, Harmless] = {**dict.fromkeys(ChatRequest.model_fields, never), **IN_CONVERSATIONS}
"""With the fields of chats, which clients of both APIs may confuse with Anthropic's: `stop` and `stop_sequences`."""
