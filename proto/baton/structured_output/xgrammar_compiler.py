"""Structured outputs as XGrammar compiles them (https://github.com/mlc-ai/xgrammar).

Needs the extra [xgrammar], which brings torch and transformers: imported only where this backend is used.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from baton.errors import InvalidRequest
from baton.structured_output.constraint import MAX_JSON_WHITESPACE, StructuredKind, StructuredOutput, is_gbnf
from baton.structured_output.structural_tag import Format, load_structural_tag
from baton.structured_output.xgrammar_schema import why_unsupported, why_unsupported_regex
from baton.tokenizer_decoder import replace_metaspace

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

NUM_THREADS = 8
"""Of one compilation, as in vLLM."""


def is_installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


class XgrammarCompiler:
    """Compiles for one tokenizer. May be called on several threads; keeps no lock meanwhile.

    tokenizer: a tokenizer.json. vocab_size: of the logits.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Takes a second for a large vocabulary. Raises InvalidRequest for a tokenizer that has none."""
        read = json.loads(tokenizer)
        if replace_metaspace(read):
            tokenizer = json.dumps(read)
        from xgrammar import GrammarCompiler, TokenizerInfo  # takes seconds

        kind = TokenizerInfo._detect_metadata_from_hf(tokenizer)
        info = TokenizerInfo(
            _vocabulary(read, vocab_size),
            kind["vocab_type"],
            vocab_size=vocab_size,
            stop_token_ids=eos_token_ids,
            add_prefix_space=kind["add_prefix_space"],
        )
        self._compiler = GrammarCompiler(info, max_threads=NUM_THREADS, cache_enabled=False)

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        """Raises InvalidRequest. May take minutes of CPU, or all memory, for a hostile one."""
        try:
            return self._compile(structured)
        except (RuntimeError, ValueError, UnicodeError) as error:
            raise InvalidRequest(_words(error), "structured_outputs") from None

    def _compile(self, structured: StructuredOutput) -> CompiledGrammar:
        match structured.kind:
            case StructuredKind.JSON_OBJECT:
                # The library's own grammar of JSON also takes other values than objects.
                schema = '{"type": "object", "additionalProperties": true}'
                return self._compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_JSON_WHITESPACE)
            case StructuredKind.JSON:
                if reason := why_unsupported(json.loads(structured.text)):
                    raise ValueError(reason)
                # In strict mode, the default, objects have no properties but those that the schema lists or describes.
                # Otherwise each object would take a second to compile, with a vocabulary of 128,000 tokens.
                return self._compiler.compile_json_schema(structured.text, max_whitespace_cnt=MAX_JSON_WHITESPACE)
            case StructuredKind.REGEX:
                if reason := why_unsupported_regex(structured.text):
                    raise ValueError(reason)
                return self._compiler.compile_regex(structured.text)
            case StructuredKind.CHOICE:
                return self._compiler.compile_grammar("root ::= " + " | ".join(map(json.dumps, structured.choices())))
            case StructuredKind.GRAMMAR:
                if reason := _why_not_gbnf(structured.text):
                    raise ValueError(reason)
                return self._compiler.compile_grammar(structured.text)
            case StructuredKind.STRUCTURAL_TAG:
                wanted = load_structural_tag(structured.text)
                if reason := next(filter(None, map(_why_unsupported, _formats(wanted))), None):
                    raise ValueError(reason)
                return self._compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": wanted}))


def _formats(wanted: Format) -> Iterator[Format]:
    """A format of a structural tag, and all within it."""
    yield wanted
    inner = [*wanted.get("elements", ()), *wanted.get("tags", ())]
    for part in [*inner, wanted["content"]] if wanted["type"] == "tag" else inner:
        yield from _formats(part)


def _why_unsupported(wanted: Format) -> str | None:
    """Of this format alone."""
    match wanted["type"]:
        case "json_schema":
            return why_unsupported(wanted["json_schema"])
        case "regex":
            return why_unsupported_regex(wanted["pattern"])
        case "grammar":
            return _why_not_gbnf(wanted["grammar"])
    return None


def _why_not_gbnf(grammar: str) -> str | None:
    return None if is_gbnf(grammar) else "XGrammar takes grammars in GBNF, `root ::= ...`, not in Lark's form"


def _vocabulary(tokenizer: dict[str, Any], vocab_size: int) -> list[str]:
    """The tokens by id. Special ones are empty, as ids without a token are: no text has them."""
    tokens = [""] * vocab_size
    vocab = tokenizer["model"]["vocab"]
    entries = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    for token, index in entries:
        if index < vocab_size:
            tokens[index] = token
    for added in tokenizer.get("added_tokens", ()):
        if added["id"] < vocab_size:
            tokens[added["id"]] = "" if added["special"] else added["content"]
    return tokens


def _words(error: Exception) -> str:
    """The library's message, without the time and its source file."""
    return re.sub(r"^\[[0-9:]+\] \S+: ", "", str(error)).strip()
