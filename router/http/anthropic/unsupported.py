"""Fields of Anthropic's API, and of the chat route, that would change an answer in a way that is not served here."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from router.http.schemas import ChatRequest
from router.http.unsupported import Harmless


def _never(value: Any) -> bool:
    return False


IN_CONVERSATIONS: Mapping[str, Harmless] = {
    "container": operator.not_,
    "context_management": operator.not_,
    "mcp_servers": operator.not_,
    "output_format": operator.not_,
}
"""Those that would change the prompt, and so also its number of tokens."""

IN_MESSAGES: Mapping[str, Harmless] = {**dict.fromkeys(ChatRequest.model_fields, _never), **IN_CONVERSATIONS}
"""With the fields of chats, which clients of both APIs may confuse with Anthropic's: `stop` and `stop_sequences`."""
