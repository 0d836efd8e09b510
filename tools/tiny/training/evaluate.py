"""Accuracy: the held-out prompts of each row of the table, and how many a saved checkpoint answers correctly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import tiny_tasks as tasks
from tools.tiny.training.settings import Settings

EVALS: dict[str, Callable[[Random], tasks.Sample]] = {
    "recall, 200 tokens": lambda rng: tasks.recall(rng, "heldout", 200),
    "recall, 500 tokens": lambda rng: tasks.recall(rng, "heldout", 500),
    "recall, 1,500 tokens": lambda rng: tasks.recall(rng, "heldout", 1500),
    "recall, 2,500 tokens": lambda rng: tasks.recall(rng, "heldout", 2500),
    "recall, 3,500 tokens": lambda rng: tasks.recall(rng, "heldout", 3500),
    "recall, 3,900 tokens": lambda rng: tasks.recall(rng, "heldout", 3900),
    "recall, 1,500 tokens, plain text": lambda rng: tasks.recall(rng, "heldout", 1500, plain=True),
    "recall from an earlier turn": lambda rng: tasks.chat_recall(rng, "heldout", rng.randint(1, 8)),
    "sum of two numbers": lambda rng: tasks.sums(rng, "heldout"),
    "sum of two numbers, plain text": lambda rng: tasks.sums(rng, "heldout", plain=True),
    "sum of three numbers": lambda rng: tasks.sums3(rng, "heldout"),
    "sort numbers": lambda rng: tasks.sort_numbers(rng, "heldout"),
    "sort words": lambda rng: tasks.sort_words(rng, "heldout"),
    "reverse a list": lambda rng: tasks.reverse(rng, "heldout"),
    "repeat": lambda rng: tasks.repeat(rng, "heldout"),
    "count items in a list": lambda rng: tasks.count_items(rng, "heldout"),
    "count up or down": lambda rng: tasks.count_up(rng, "heldout"),
    "fill a JSON object": lambda rng: tasks.fill_json(rng, "heldout"),
    "call a tool": lambda rng: tasks.tool_call(rng, "heldout"),
    "call tools twice": lambda rng: tasks.tool_calls(rng, "heldout"),
    "extract facts by a tool": lambda rng: tasks.tool_extract(rng, "heldout"),
    "answer from tools' results": lambda rng: tasks.tool_result(rng, "heldout"),
    "step of a chain of two calls": lambda rng: tasks.tool_chain(rng, "heldout"),
    "fill a JSON schema": lambda rng: tasks.fill_schema(rng, "heldout"),
    "answer without the tools": lambda rng: tasks.no_tool(rng, "heldout"),
    "story": lambda rng: tasks.story(rng, "heldout"),
    "long story": lambda rng: tasks.long_story(rng, "heldout"),
    "small talk": lambda rng: tasks.small_talk(rng, "heldout"),
}
PROBES = [name for name in EVALS if "story" not in name and "200" not in name and "2,500" not in name]


def heldout(name: str, count: int, seed: int) -> list[tasks.Sample]:
    """`count` held-out samples of one row of the accuracy table."""
    rng = Random(f"{name} {seed}")
    return [EVALS[name](rng) for _ in range(count)]


@dataclass(frozen=True)
class Score:
    """One row of the accuracy table."""

    name: str
    num_prompts: int
    num_right: int
    mean_prompt_tokens: float
    mean_answer_tokens: float


def evaluate(settings: Settings) -> list[Score]:
    """Greedy generation on held-out prompts with the saved weights in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(settings.out)
    model: Any = AutoModelForCausalLM.from_pretrained(settings.out, dtype=torch.float32)
    model = model.to(settings.device).eval()
    scores = []
    for name in settings.eval_rows:
        samples = heldout(name, settings.eval_prompts, seed=2)
        if max(len(prompt_ids(tokenizer, sample)) for sample in samples) <= settings.max_length:
            scores.append(score(name, model, tokenizer, samples))
            print(f"{name}: {scores[-1].num_right} of {scores[-1].num_prompts}", flush=True)
    return scores


def prompt_ids(tokenizer: Any, sample: tasks.Sample) -> list[int]:
    """The token ids of a sample's prompt."""
    if sample.plain:
        return list(tokenizer.encode(sample.prompt))
    tools = list(sample.tools) or None
    return list(
        tokenizer.apply_chat_template(sample.messages, tools=tools, add_generation_prompt=True, return_dict=False)
    )


@torch.inference_mode()
def score(name: str, model: Any, tokenizer: Any, samples: Sequence[tasks.Sample]) -> Score:
    """One row of the table, in batches of up to about 100,000 prompt tokens on a GPU, 4,096 on a CPU."""
    prompts = [prompt_ids(tokenizer, sample) for sample in samples]
    longest = max(map(len, prompts))
    size = max(1, min(len(samples), 100_000 // longest if model.device.type == "cuda" else 4096 // longest))
    right, num_out = 0, 0
    for start in range(0, len(samples), size):
        replies = greedy(model, tokenizer, prompts[start : start + size], samples[start : start + size])
        num_out += sum(len(tokenizer.encode(reply, add_special_tokens=False)) + 1 for reply in replies)
        right += sum(sample.check(reply) for sample, reply in zip(samples[start:], replies, strict=False))
    return Score(name, len(samples), right, sum(map(len, prompts)) / len(samples), num_out / len(samples))


def greedy(model: Any, tokenizer: Any, prompts: Sequence[list[int]], samples: Sequence[tasks.Sample]) -> list[str]:
    """The greedy replies to a batch of prompts."""
    batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt").to(model.device)
    num_new = max(len(tokenizer.encode(sample.answer)) for sample in samples) + 16
    if any(sample.kind == "story" for sample in samples):
        num_new = 400
    out = model.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=num_new
    )
    return list(tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))
