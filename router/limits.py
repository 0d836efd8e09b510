"""What one request may carry, whichever front end it came through. What an operator may want to change is a flag."""

from __future__ import annotations

MAX_N = 128
"""As in OpenAI's API."""
MAX_MESSAGES = 10_000
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 256
"""Of a model, and of who speaks in a chat."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 2048
"""Of all stop strings together: what their automaton costs to build and to keep."""
MAX_COUNTED_CHARS = 2**20
"""Of a text that is tokenized for its own sake: whoever asks how many tokens it has need not know that it fits."""
MAX_ECHO_CHARS = 2**22
"""Of all answers to a request that repeat their prompt."""
MAX_TEMPLATE_VALUES = 256
MAX_TEMPLATE_CHARS = 16_384
MAX_TEMPLATE_DEPTH = 8
"""Of `chat_template_kwargs`: values of all kinds, characters of names and texts, and nesting."""
MAX_UNKNOWN_FIELDS = 64
