"""Tool parsers by name: those of this package, and those of entry points in the group `baton.tool_parsers`."""

from __future__ import annotations

from collections.abc import Mapping

from router.plugins import load_plugin
from router.tool_parsers.base import ToolParser
from router.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from router.tool_parsers.gemma import Gemma4Parser, GemmaParser
from router.tool_parsers.harmony import GptOssParser
from router.tool_parsers.invoke import DeepSeekV32Parser, MinimaxM2Parser
from router.tool_parsers.json_formats import (
    GraniteParser,
    HermesParser,
    InternLmParser,
    KimiK2Parser,
    Llama3JsonParser,
    MistralParser,
    Phi4MiniJsonParser,
)
from router.tool_parsers.markup import Glm45Parser, Qwen3CoderParser
from router.tool_parsers.pythonic import Olmo3Parser, PythonicParser

GROUP = "baton.tool_parsers"
TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
    "gemma": GemmaParser,
    "gemma4": Gemma4Parser,
    "glm45": Glm45Parser,
    "gpt_oss": GptOssParser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "internlm": InternLmParser,
    "kimi_k2": KimiK2Parser,
    "llama3_json": Llama3JsonParser,
    "minimax_m2": MinimaxM2Parser,
    "mistral": MistralParser,
    "olmo3": Olmo3Parser,
    "phi4_mini_json": Phi4MiniJsonParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}


def find_tool_parser(name: str) -> type[ToolParser]:
    """Raises UnknownPlugin."""
    return load_plugin(GROUP, name, TOOL_PARSERS, ToolParser)  # type: ignore[type-abstract]  # never made
