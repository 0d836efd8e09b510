"""Tool parsers by name: those of this package, and those of entry points in the group `baton.tool_parsers`."""

from __future__ import annotations

from collections.abc import Mapping

from router.plugins import load_plugin
from router.tool_parsers.base import ToolParser
from router.tool_parsers.gemma import Gemma4Parser, GemmaParser
from router.tool_parsers.harmony import GptOssParser
from router.tool_parsers.json_formats import HermesParser, KimiK2Parser, Llama3JsonParser, MistralParser
from router.tool_parsers.markup import Glm45Parser, Qwen3CoderParser
from router.tool_parsers.pythonic import PythonicParser

GROUP = "baton.tool_parsers"
TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "gemma": GemmaParser,
    "gemma4": Gemma4Parser,
    "glm45": Glm45Parser,
    "gpt_oss": GptOssParser,
    "hermes": HermesParser,
    "kimi_k2": KimiK2Parser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}


def find_tool_parser(name: str) -> type[ToolParser]:
    """Raises UnknownPlugin."""
    return load_plugin(GROUP, name, TOOL_PARSERS, ToolParser)  # type: ignore[type-abstract]  # never made
