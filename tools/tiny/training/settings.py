"""The settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Settings:
    """The settings of a run; the flag `--smoke` substitutes values that a CPU can handle in a minute."""

    out: Path
    minutes: float
    steps: int
    seed: int
    device: torch.device
    compiled: bool
    resume: Path | None
    peak_lr: float
    num_workers: int
    slab_tokens: int
    slabs_per_step: int
    max_length: int
    eval_prompts: int
    eval_rows: tuple[str, ...]
    save_every_s: float
    card_date: str
    mixture: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products; the master weights are always fp32."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32
