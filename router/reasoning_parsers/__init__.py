"""Parts the reasoning of answers from their content, while the text arrives.

Other packages add parsers by subclassing `ReasoningParser` and naming the class as an entry point in the group
`baton.reasoning_parsers`.
"""

from collections.abc import Mapping

from router.plugins import load_plugin
from router.reasoning_parsers.base import ReasoningDelta, ReasoningMarks, ReasoningParser
from router.reasoning_parsers.harmony import GptOssParser
from router.reasoning_parsers.tags import (
    DeepSeekR1Parser,
    DeepSeekV3Parser,
    Gemma4Parser,
    Glm45Parser,
    GraniteParser,
    KimiK2Parser,
    MistralParser,
    Qwen3Parser,
)

GROUP = "baton.reasoning_parsers"
REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": DeepSeekV3Parser,
    "gemma4": Gemma4Parser,
    "glm45": Glm45Parser,
    "gpt_oss": GptOssParser,
    "granite": GraniteParser,
    "kimi_k2": KimiK2Parser,
    "minimax_m2": DeepSeekR1Parser,
    "mistral": MistralParser,
    "olmo3": DeepSeekV3Parser,
    "qwen3": Qwen3Parser,
}


def find_reasoning_parser(name: str) -> type[ReasoningParser]:
    """Raises UnknownPlugin."""
    return load_plugin(GROUP, name, REASONING_PARSERS, ReasoningParser)  # type: ignore[type-abstract]  # never made


__all__ = ["REASONING_PARSERS", "ReasoningDelta", "ReasoningMarks", "ReasoningParser", "find_reasoning_parser"]
