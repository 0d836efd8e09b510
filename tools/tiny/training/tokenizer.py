"""The tokenizer: byte-level BPE trained on the tasks, with the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools import tiny_tasks as tasks
from tools.tiny.tasks.grammar import invented_name
from tools.tiny.tasks.words import ADJECTIVES, COMMON, WORDS

PAD, BOS, EOT, IM_START, IM_END = range(5)
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]

VOCAB_SIZE = 4096
MAX_LENGTH = 4096

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- macro text_of(content) %}
{%- if content is string %}
{{- content }}
{%- else %}
{%- for part in content or [] %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- macro type_of(schema, defs) %}
{%- if schema['$ref'] %}
{{- type_of(defs[schema['$ref'].split('/')[-1]] or {}, {}) }}
{%- elif schema.enum %}
{{- schema.enum | reject('none') | join('|') }}
{%- elif schema.anyOf %}
{%- for choice in schema.anyOf if choice.type != 'null' %}
{{- type_of(choice, defs) ~ ('|' if not loop.last else '') }}
{%- endfor %}
{%- elif schema.type is string %}
{{- schema.type }}
{%- else %}
{{- schema.type | reject('equalto', 'null') | join('|') if schema.type else 'any' }}
{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}
{{- text_of(messages[0].content) ~ '\\n\\n' }}
{%- set messages = messages[1:] %}
{%- endif %}
{{- 'You can call these tools:' }}
{%- for tool in tools %}
{%- set function = tool.function %}
{{- '\\n' ~ function.name ~ '(' }}
{%- set parameters = function.parameters or {} %}
{%- for name, schema in (parameters.properties or {}).items() %}
{{- name ~ ('' if name in (parameters.required or []) else '?') ~ ': ' }}
{{- type_of(schema, parameters['$defs'] or {}) or 'any' }}
{{- ', ' if not loop.last }}
{%- endfor %}
{{- ')' }}
{%- set description = (function.description or '').strip().split('\\n')[0][:80] %}
{{- ' ' ~ description if description }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('Unknown role: ' ~ message.role) }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{{- text_of(message.content) }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' }}
{{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def corpus(seed: int, num_chats: int) -> Iterator[str]:
    """Text to train the tokenizer on: the tasks, invented names, and everyday English words."""
    rng = Random(seed)
    for _ in range(num_chats):
        make = rng.choice((tasks.task_chat, tasks.document_chat, tasks.chunked_chat))
        yield "\n".join(message["content"] for message in make(rng, 400, "train"))
        yield " ".join(invented_name(rng) for _ in range(3))
    words = [*COMMON, *WORDS, *ADJECTIVES, "system", "user", "assistant"]
    for word in words:
        yield f" {word}" * 40
        yield f"{word}\n{word.capitalize()}\n" * 10


def build_tokenizer(seed: int, num_chats: int = 6000) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most 4,096 tokens, with a separate token for every digit."""
    tokenizer = Tokenizer(models.BPE())
    cuts = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cuts, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, num_chats), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    wrapped: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>", "<|im_start|>"],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
    return wrapped
