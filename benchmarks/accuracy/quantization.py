"""What quantization costs in quality: `python -m benchmarks.accuracy.quantization`.

Writes a checkpoint in each published format (`tools.quantize`), and asks for: the share of held-out tasks with a right
greedy answer, perplexity of held-out stories, and how far logits are from those of the unquantized weights. All in fp32
on a CPU, where nodes compute exactly what the stored weights stand for: the loader's weights are compared first. Then
the same for the unquantized weights over a KV cache of 8 bits, with which nodes answer as the model asked here does
(`tests/e2e/test_quantized_parity.py`).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.settings import Settings, parse
from benchmarks.harness.checks import WrongAnswers
from benchmarks.harness.tables import Table
from engine.checkpoint import EMBEDDED
from engine.model.linear_method import linear_layers
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from tools import tiny_tasks as tasks
from tools.quantize import FORMATS, write
from tools.rounded_kv import ROUNDED_KV
from tools.tiny.training.evaluate import heldout, score

KV = "kv-fp8"
ROWS = (
    "recall, 500 tokens",
    "sum of two numbers",
    "sort words",
    "reverse a list",
    "count items in a list",
    "fill a JSON object",
    "call a tool",
)


class QualitySettings(Settings):
    """Measures the quality of baton-tiny in each format."""

    prog: ClassVar[str] = "benchmarks.accuracy.quantization"

    num_prompts: int = Field(50, ge=1, description=f"of each of {len(ROWS)} tasks")
    num_stories: int = Field(64, ge=1, description="whose perplexity is measured")
    formats: str = Field(",".join((*FORMATS, KV)), description="comma-separated, of weights; kv-fp8: of the KV cache")

    @field_validator("formats")
    @classmethod
    def _check_formats(cls, formats: str) -> str:
        if unknown := set(formats.split(",")) - {*FORMATS, KV}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        return formats


@dataclass(frozen=True, slots=True)
class Quality:
    """logits_error: the norm of the difference to the unquantized model's logits over their norm, the mean over the
    stories' tokens."""

    form: str
    accuracy: float
    perplexity: float
    logits_error: float
    same_argmax: float


def main() -> None:
    settings = parse(QualitySettings)
    source = EMBEDDED["baton-tiny"]
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    rng = Random("quality")
    stories = [
        tokenizer.encode(tokenizer.bos_token + tasks.story_text(rng, "heron", 8), add_special_tokens=False)
        for _ in range(settings.num_stories)
    ]
    original = _plain(source)
    expected = [_logits(original, story) for story in stories]
    found = [_measure("none", original, tokenizer, settings, stories, expected)]
    print(found[-1], flush=True)
    for form in settings.formats.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = _plain(source, ROUNDED_KV) if form == KV else _served(source, Path(folder), form)
        found.append(_measure(form, model, tokenizer, settings, stories, expected))
        print(found[-1], flush=True)
    print(table(found).markdown())
    print(json.dumps({"benchmark": "quantized_quality", "formats": [asdict(quality) for quality in found]}))


def table(found: Sequence[Quality]) -> Table:
    columns = ["format", "tasks right", "perplexity", "error of logits", "same argmax"]
    rows = [
        [q.form, f"{q.accuracy:.1%}", f"{q.perplexity:.4f}", f"{q.logits_error:.3f}", f"{q.same_argmax:.1%}"]
        for q in found
    ]
    return Table(columns, rows)


def _plain(folder: Path, attention: str = "sdpa") -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    ).eval()


def _served(source: Path, folder: Path, form: str) -> Any:
    """transformers' model with the dequantized weights. Raises WrongAnswers if a node would load others."""
    write(source, folder / "quantized", form)
    write(source, folder / "plain", form, dequantized=True)
    served = load_model(Checkpoint.open(folder / "quantized"))
    model = _plain(folder / "plain")
    for name, module in linear_layers(model):
        if not torch.equal(module.weight, served.get_submodule(name).weight):
            raise WrongAnswers(f"{form}: {name} is loaded with other values")
    return model


@torch.inference_mode()
def _logits(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@torch.inference_mode()
def _measure(
    form: str,
    model: Any,
    tokenizer: Any,
    settings: QualitySettings,
    stories: Sequence[list[int]],
    expected: Sequence[Tensor],
) -> Quality:
    scores = [score(row, model, tokenizer, heldout(row, settings.num_prompts, seed=3)) for row in ROWS]
    loss, errors, same, count = 0.0, 0.0, 0, 0
    for tokens, wanted in zip(stories, expected, strict=True):
        logits = _logits(model, tokens)
        loss += float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum"))
        errors += float(((logits - wanted).norm(dim=-1) / wanted.norm(dim=-1))[:-1].sum())
        same += int((logits.argmax(-1) == wanted.argmax(-1))[:-1].sum())
        count += len(tokens) - 1
    right = sum(row.num_right for row in scores) / sum(row.num_prompts for row in scores)
    return Quality(form, right, math.exp(loss / count), errors / count, same / count)


if __name__ == "__main__":
    main()
