"""Logits of every family, chunked over paged KV with fast modules, against transformers' eager attention in fp32."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.accuracy import logits
from benchmarks.accuracy.random_models import FAMILIES

torch.set_num_threads(1)

FP32_ROUNDING = 2e-5
"""Relative to the norm of a token's logits: 0.6e-5 to 1.2e-5 have been seen of the same family, since the order of a
product's sums depends on where its memory lies."""

# Of transformers' own error in the dtype, for which rounding is to blame alone.
SIXTEEN_BIT_MARGIN = 1.5
MIXTURE_MARGIN = 3.0
"""Rounding sends some tokens to other experts, here and there others."""

ROPE = {"cohere2": "rope 1/2", "exaone4": "rope 1/2", "smollm3": "rope 1/2", "mistral3": "rope 0/2"}
"""Layers without RoPE, or that scale queries after it."""
OWN_POSITIONS = ("gemma3n", "gpt2")
"""Those that rotate in a way of their own, or not at all."""
ONLY_FULL = (
    "cohere2",
    "ernie4.5 moe",
    "exaone4",
    "gemma3n",
    "glm4",
    "gpt2",
    "gpt neox",
    "mistral3",
    "olmo3",
    "qwen3 vl",
    "starcoder2",
)


def check_rope(compared: logits.Compared) -> None:
    assert compared.family in OWN_POSITIONS or ROPE.get(compared.family, "rope 2/2") in compared.fused


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.full] if name in ONLY_FULL else []) for name in FAMILIES]
)
def test_fp32(family: str) -> None:
    compared = logits.compare(family, torch.device("cpu"), torch.float32)
    assert compared.ours.same_argmax == compared.ours.num_tokens == sum(logits.LENGTHS)
    assert compared.ours.worst_error < FP32_ROUNDING
    check_rope(compared)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_on_a_gpu(family: str) -> None:
    compared = logits.compare(family, torch.device("cuda"), torch.float32)
    assert compared.ours.same_argmax == compared.ours.num_tokens
    assert compared.ours.worst_error < 1e-4
    check_rope(compared)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bits_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    compared = logits.compare(family, torch.device("cuda"), dtype)
    is_mixture = "experts" in compared.fused
    margin, least = (MIXTURE_MARGIN, 0.85) if is_mixture else (SIXTEEN_BIT_MARGIN, 0.9)
    assert compared.ours.mean_error < margin * compared.own_dtype.mean_error
    assert compared.ours.same_argmax >= least * compared.ours.num_tokens
    check_rope(compared)


def test_the_script_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logits.main(["--families", "llama"])
    *_, line = capsys.readouterr().out.splitlines()
    (result,) = json.loads(line)["results"]
    assert result["ours"]["num_tokens"] == sum(logits.LENGTHS)
