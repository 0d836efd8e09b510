"""Makes `references.npz`: greedy answers of `transformers`' own `generate`, in fp32, for the parity tests.

    python -m tests.e2e.references

To be run again whenever the embedded checkpoint changes; takes about two minutes on one core. One prompt at a time, so
that nothing is padded. Half of the prompts of each kind are generated past their EOS.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engine.model.load.checkpoint import Checkpoint
from tests.e2e.reference_file import FILE, Reference, ReferenceFile, save
from tools import tiny_tasks

MODEL = "baton-tiny"
SEED = 20_26
NUM_EACH = 112
MAX_PROMPT_TOKENS = 3500
SHARED_PREFIX_TOKENS = 640
SHARED_AT = (1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100, 127, 128, 129, 240, 256, 333, 512, 575, 576, 639, 640)
"""Where prompts leave the common prefix: around block boundaries (16) and slot boundaries (256), and at it."""
LONG = ((40, 600), (900, 600), (2600, 400))
"""(prompt tokens, output tokens)."""

Wanted = tuple[str, list[int], int, bool]
"""kind, prompt, max_tokens, ignore_eos"""


def main() -> None:
    torch.set_num_threads(1)
    checkpoint = Checkpoint.find(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.path, dtype=torch.float32, local_files_only=True
    ).eval()
    model.generation_config = GenerationConfig()  # not the checkpoint's sampling defaults
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    eos = list(checkpoint.generation_defaults.eos_token_ids)
    began, references = time.monotonic(), []
    for wanted in _wanted(tokenizer):
        references.append(generate(model, eos, *wanted))
        print(f"\r{len(references)} prompts, {time.monotonic() - began:.0f} s", end="", flush=True)
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    save(ReferenceFile(checkpoint.fingerprint(), made_with, tuple(references)))
    margins = sorted(margin for reference in references for margin in reference.margins)
    print(f"\n{FILE.name}: {FILE.stat().st_size} bytes, smallest margins {[f'{m:.1e}' for m in margins[:5]]}")


@torch.inference_mode()
def generate(model: Any, eos: list[int], kind: str, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Reference:
    ids = torch.tensor([prompt])
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None if ignore_eos else eos,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with _expert_margins(model) as expert_margins:
        made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    output = made.sequences[0, len(prompt) :].tolist()
    best = [step[0].topk(2).values.tolist() for step in made.logits]
    margins = tuple(first - second for first, second in best)
    finish = "stop" if not ignore_eos and output[-1] in eos else "length"
    least = tuple(itertools.accumulate(expert_margins, min))
    return Reference(kind, tuple(prompt), tuple(output), margins, max_tokens, ignore_eos, finish, least)


@contextlib.contextmanager
def _expert_margins(model: Any) -> Iterator[list[float]]:
    """Of each forward meanwhile, the least by which a router chose an expert instead of another. Routers are modules
    with a weight and `top_k`, and choose the largest logits."""
    margins: list[float] = []

    def begin(*_: Any) -> None:
        margins.append(math.inf)

    def see(router: Any, inputs: tuple[torch.Tensor], _: Any) -> None:
        logits = F.linear(inputs[0].flatten(0, -2), router.weight, getattr(router, "bias", None))
        best = logits.topk(router.top_k + 1).values
        margins[-1] = min(margins[-1], float((best[:, -2] - best[:, -1]).min()))

    routers = [module for module in model.modules() if isinstance(getattr(module, "top_k", None), int)]
    hooks = [model.register_forward_pre_hook(begin), *(router.register_forward_hook(see) for router in routers)]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()
        if not routers:
            margins.clear()


def _wanted(tokenizer: Any) -> Iterator[Wanted]:
    rng = Random(SEED)
    vocab_size = len(tokenizer)
    for i in range(NUM_EACH):
        length = _log_uniform(rng, i)
        yield "ids", _random_ids(rng, vocab_size, length), _num_outputs(i), i % 2 == 0
    for i in range(NUM_EACH):
        yield "text", _text(rng, tokenizer, _log_uniform(rng, i), i), _num_outputs(i), i % 4 < 2
    prefix = _random_ids(rng, vocab_size, SHARED_PREFIX_TOKENS)
    for i, cut in enumerate(SHARED_AT):
        yield "shared", prefix[:cut] + _random_ids(rng, vocab_size, rng.randrange(1, 40)), _num_outputs(i), i % 2 == 0
    for length, max_tokens in LONG:
        yield "long", _text(rng, tokenizer, length, 0), max_tokens, True


def _log_uniform(rng: Random, index: int) -> int:
    """Prompt `index` of NUM_EACH: one length from each of NUM_EACH equal pieces of the logarithmic scale."""
    return max(1, round(math.exp((index + rng.random()) / NUM_EACH * math.log(MAX_PROMPT_TOKENS))))


def _num_outputs(index: int) -> int:
    return 16 + index % 17


def _random_ids(rng: Random, vocab_size: int, length: int) -> list[int]:
    return [int(rng.random() * vocab_size) for _ in range(length)]


def _text(rng: Random, tokenizer: Any, length: int, index: int) -> list[int]:
    """A prompt of about `length` tokens that is text: a beginning of a story, or a long text with a question to it."""
    if length < 50:
        story = tiny_tasks.story_text(rng, "fox", 8)
        text = tokenizer.bos_token + story[: (length - 1) * 4].strip()
    elif index % 2:
        sample = tiny_tasks.recall(rng, "heldout", num_tokens=length, plain=True)
        text = tokenizer.bos_token + sample.prompt
    else:
        sample = tiny_tasks.recall(rng, "heldout", num_tokens=length)
        text = tokenizer.apply_chat_template(sample.messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text, "the tests send the text of these ids"
    return ids


if __name__ == "__main__":
    main()
