"""What one request may carry, through either front end. Limits that operators may want to change are flags instead."""

from __future__ import annotations

from baton.node_info import MAX_MODEL_CHARS

MAX_N = 128
"""As in OpenAI's API."""
MAX_MESSAGES = 10_000
MAX_SAMPLING_PARAMS = 10_000
"""Of one request, which may have some for each of its prompts. They are read in one go, of 30 ms."""
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = MAX_MODEL_CHARS
"""Of the name of a model, and of a speaker in a chat."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 2048
"""Of all stop strings together: bounds the cost of building and keeping their automaton."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 8192
"""Of all bad words together."""
MAX_COUNTED_CHARS = 2**20
"""Of a text for `/tokenize`: a client that asks for the number of tokens need not know whether the text fits."""
MAX_ECHO_CHARS = 2**22
"""Of all answers to a request that repeat their prompt."""
MAX_PROMPT_LOGPROBS = 2**20
"""Of all answers to a request: a prompt of 32,768 tokens with 20 alternatives each has 688,128."""
MAX_STREAMED_LOGPROBS = 2**15
"""Those of the prompt, of all answers to a streamed request, since they are written in one chunk of each; and likewise
what a chunk has of an answer, if there are more of each token than by default."""
MAX_ANSWER_LOGPROBS = 2**22
"""Of all answers to a request with more logprobs of each token than there are by default: a whole answer, as chats have
it, takes half a kilobyte for each while it is written."""
MAX_TEMPLATE_VALUES = 256
MAX_TEMPLATE_CHARS = 16_384
MAX_TEMPLATE_DEPTH = 8
"""Of `chat_template_kwargs`: values of all kinds, characters of names and texts, and nesting."""
MAX_CHAT_TEMPLATE_CHARS = 65_536
"""Of a chat template in a request; the longest that models have are a third of it."""
MAX_RENDERED_CHARS = 2**22
"""Of the prompt that such a template writes."""
MAX_DOCUMENTS = 1024
MAX_DOCUMENT_CHARS = 2**22
MAX_DOCUMENT_VALUES = 16_384
MAX_DOCUMENT_DEPTH = 8
"""Of all `documents` of a request: names and texts, values of all kinds, and nesting."""
MAX_TOOLS = 128
"""As in OpenAI's API."""
MAX_TOOL_CHARS = 262_144
"""Of all tools of a request: names and texts of their descriptions and schemas."""
MAX_TOOL_VALUES = 16_384
MAX_TOOL_DEPTH = 32
"""Of one tool's schema: values of all kinds, and nesting."""
MAX_TOOL_CALLS = 128
"""Of one message."""
MAX_UNKNOWN_FIELDS = 64
