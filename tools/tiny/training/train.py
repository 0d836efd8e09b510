"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tools.tiny.training.codec import Codec
from tools.tiny.training.forward import FlatForward, on_device
from tools.tiny.training.mixture import forward_of
from tools.tiny.training.model import save
from tools.tiny.training.probe import Probe
from tools.tiny.training.settings import Settings
from tools.tiny.training.slabs import Slab
from tools.tiny.training.source import SlabSource

PROMPT_LOSS = 0.1  # relative to the loss on answers; enough to learn the language, too little to crowd out the tasks


def merge(slabs: Sequence[Slab]) -> tuple[list[Slab], list[tuple[int, int]]]:
    """Slabs sorted by length, and the (rows, length) of each run of equal lengths."""
    ordered = sorted(slabs, key=lambda slab: slab.length)
    rows: dict[int, int] = {}
    for slab in ordered:
        rows[slab.length] = rows.get(slab.length, 0) + len(slab.tokens) // slab.length
    return ordered, [(count, length) for length, count in rows.items()]


def batch_loss(forward: FlatForward, slabs: Sequence[Slab], device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss to minimize, and its component for answers."""
    ordered, shapes = merge(slabs)
    tokens, targets, codes = (
        on_device(np.concatenate([getattr(slab, name) for slab in ordered]), device)
        for name in ("tokens", "targets", "codes")
    )
    losses = forward.losses(tokens, targets, shapes)
    weights = (codes - 1).clamp(min=0).float()
    answers = (losses * weights).sum() / weights.sum().clamp(min=1)
    prompts = (losses * (codes == 1)).sum() / (codes == 1).sum().clamp(min=1)
    return answers + PROMPT_LOSS * prompts + forward.extra_loss(), answers.detach()


def learning_rate(progress: float, peak: float) -> float:
    """Warm up for 2% of the run, stay constant until half of it, then decay along a cosine to a fiftieth."""
    if progress < 0.02:
        return peak * max(progress / 0.02, 0.01)
    if progress < 0.5:
        return peak
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min((progress - 0.5) / 0.5, 1))))


def new_optimizer(model: PreTrainedModel, settings: Settings) -> torch.optim.Optimizer:
    """AdamW, with weight decay only on matrices."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    fused = settings.device.type == "cuda"
    return torch.optim.AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), fused=fused)


class Clock:
    """The progress of the run, by steps if their number is given, otherwise by time."""

    def __init__(self, settings: Settings) -> None:
        self._steps, self._seconds = settings.steps, settings.minutes * 60
        self.step, self._start = 0, time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    @property
    def progress(self) -> float:
        return self.step / self._steps if self._steps else self.elapsed_s / self._seconds


def train(settings: Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: SlabSource) -> int:
    """Train until the end of the run, saving periodically; returns the number of tokens seen."""
    forward = forward_of(model, settings, settings.compiled)
    probe = Probe(settings, model, Codec(tokenizer))
    optimizer = new_optimizer(model, settings)
    one_step(settings, forward, optimizer, source, 0.0)  # compiles, before the clock starts
    clock, saved_s = Clock(settings), 0.0
    while clock.progress < 1:
        source.progress.value = clock.progress
        answers = one_step(settings, forward, optimizer, source, learning_rate(clock.progress, settings.peak_lr))
        clock.step += 1
        if clock.step % 200 == 0:
            report(clock, float(answers), source, settings)  # float() waits, which keeps the clock in step with the GPU
        if clock.elapsed_s - saved_s > settings.save_every_s:
            saved_s = clock.elapsed_s
            print(f"probe step={clock.step} {probe.run()}", flush=True)
            save(settings.out, model, tokenizer)
    return clock.step * settings.slab_tokens * settings.slabs_per_step


def one_step(
    settings: Settings, forward: FlatForward, optimizer: torch.optim.Optimizer, source: SlabSource, lr: float
) -> Tensor:
    """One step of the optimizer; returns the mean loss on answers."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    loss, answers = batch_loss(forward, source.get(settings.slabs_per_step), settings.device)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return answers


def report(clock: Clock, answers: float, source: SlabSource, settings: Settings) -> None:
    """One line of progress."""
    rate = clock.step * settings.slab_tokens * settings.slabs_per_step / clock.elapsed_s
    print(
        f"step={clock.step} progress={clock.progress:.3f} answer_loss={answers:.4f} tokens_per_s={rate:,.0f} "
        f"waited_for_data_s={source.waited_s:.1f} elapsed_s={clock.elapsed_s:.0f}",
        flush=True,
    )
