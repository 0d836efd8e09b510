"""Fields of Anthropic's API, and of the chat route, that would change an answer in a way that is not served here."""

from __future__ import annotations

from collections.abc import Mapping

from router.http.schemas import ChatRequest
from router.http.unsupported import Harmless, is_empty, never

IN_CONVERSATIONS: Mapping[str, Harmless] = {
    "container": is_empty,
    "context_management": is_empty,
    "mcp_servers": is_empty,
    "output_format": is_empty,
}
"""Those that would change the prompt, and so also its number of tokens."""

IN_MESSAGES: Mapping[str, Harmless] = {**dict.fromkeys(ChatRequest.model_fields, never), **IN_CONVERSATIONS}
"""With the fields of chats, which clients of both APIs may confuse with Anthropic's: `stop` and `stop_sequences`."""
