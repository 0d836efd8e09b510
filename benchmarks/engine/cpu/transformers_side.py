"""transformers' side of `benchmarks.engine.cpu`: its `generate`, with attention by torch's sdpa, its default."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


def open_runner(name: str, dtype: str, folder: Path, threads: int) -> GenerateRunner:
    torch.set_num_threads(threads)
    return GenerateRunner(_load(name, dtype, folder))


def _load(name: str, dtype: str, folder: Path) -> Any:
    auto_class: Any = AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": torch.bfloat16 if dtype in ("bf16", "int8") else torch.float32}
    if name == "transformers-torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        options["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    elif name == "transformers-torch-dynamic":
        options["dtype"] = torch.float32
    model = auto_class.from_pretrained(folder, **options).eval()
    if name == "transformers-torch-dynamic":
        from torch.ao.quantization import quantize_dynamic

        model = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    return model


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """When each step ended; stops nothing."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class GenerateRunner:
    """See `benchmarks.engine.cpu.side.Runner`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[float]]:
        ids, clock = torch.tensor(prompts), _Clock()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        times = [(end - start) * 1e3 for start, end in zip(clock.times, clock.times[1:], strict=False)]
        return out[:, ids.shape[1] :].tolist(), times
