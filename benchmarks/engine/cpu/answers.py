"""Checks the greedy answers of all sides of `benchmarks.engine.cpu` by transformers' logits in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.cpu.side import prompts
from benchmarks.harness.checks import WrongAnswers

Answers = list[list[int]]

MAX_SHORTFALL = {"fp32": 0.01, "bf16": 0.6, "int8": 1.0, "awq": 0.6}
"""How far a token's logit may be below the best, in standard deviations of the logits: a wrong token is 4 below."""


@torch.inference_mode()
def check(folder: Path, dtype: str, answers: dict[str, Answers]) -> dict[str, float]:
    """The largest shortfall of each side. Raises WrongAnswers."""
    auto_class: Any = AutoModelForCausalLM
    reference = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = {name: max(_shortfall(reference, i, tokens) for i, tokens in enumerate(of)) for name, of in answers.items()}
    for name, shortfall in found.items():
        if shortfall > MAX_SHORTFALL[dtype]:
            raise WrongAnswers(f"{name} in {dtype}: a token's logit is {shortfall:.2f} deviations below the best")
    return found


def _shortfall(reference: Any, index: int, tokens: list[int]) -> float:
    prompt = prompts(index + 1)[index]
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    logits = reference(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(((logits.max(dim=-1).values - chosen) / logits.std(dim=-1)).max())
