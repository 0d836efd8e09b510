"""A small byte-level tokenizer and a chat template, made in memory."""

import functools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from router.text.tokenizer import Tokenizer

SPECIAL = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
BOS, IM_START, IM_END, EOT = 1, 2, 3, 4
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there",
    "naïve café 你好世界 🙂🙃",
    "1 + 2 = 3",
]
CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('Unknown role: ' ~ message.role) }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}


@functools.cache
def tokenizer_json() -> bytes:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer.to_str().encode()


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_json())


def vocab_size() -> int:
    return tokenizers.Tokenizer.from_str(tokenizer_json().decode()).get_vocab_size()
