"""Weights as in vLLM's dummy format: small, even, norms included. How much power a GPU takes for a product, and which
experts tokens choose, depends on the numbers."""

from __future__ import annotations

import torch

from benchmarks.engine.bench import Bench
from benchmarks.engine.check import is_quantized

RANGE = 1e-3
"""vllm/model_executor/model_loader/weight_utils.py, initialize_dummy_weights."""


def fill(bench: Bench) -> bool:
    """The model is useless afterwards. False, and nothing is done, for a model with its own or with quantized weights,
    and for one of several ranks, whose other parts are out of reach here."""
    if bench.settings.load_format != "dummy" or is_quantized(bench) or bench.settings.num_ranks > 1:
        return False
    with torch.inference_mode():
        for weight in bench.built.runner.model.parameters():
            weight.uniform_(-RANGE, RANGE)
    return True
