"""A quick measure of the model while it trains."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from tools.tiny.training.codec import Codec, encode_sample
from tools.tiny.training.evaluate import PROBES, heldout
from tools.tiny.training.forward import on_device
from tools.tiny.training.mixture import forward_of
from tools.tiny.training.settings import Settings
from tools.tiny.training.slabs import Slab, build_slab


class Probe:
    """A quick measure while training: whether every token of the answer is the most likely one, given those before it.

    For a task with one right answer, this is equivalent to greedy generation producing it.
    """

    def __init__(self, settings: Settings, model: PreTrainedModel, codec: Codec) -> None:
        self._forward = forward_of(model, settings, compiled=False)
        self._device = settings.device
        self._slabs = {}
        for name in PROBES:
            rows = [encode_sample(codec, item) for item in heldout(name, max(settings.eval_prompts // 4, 4), seed=1)]
            longest = max(len(ids) for ids, _ in rows)
            if longest <= settings.max_length:
                self._slabs[name] = build_slab(rows, longest)

    @torch.inference_mode()
    def run(self) -> str:
        """The accuracies as one line."""
        return " ".join(f"{name.replace(' ', '_')}={self._one(slab):.2f}" for name, slab in self._slabs.items())

    def _one(self, slab: Slab) -> float:
        rows = len(slab.tokens) // slab.length
        predicted = self._forward.predicted(on_device(slab.tokens, self._device), [(rows, slab.length)])
        right = predicted == on_device(slab.targets, self._device)
        wrong_answer = ~right & (on_device(slab.codes, self._device) == 2)
        return float((~wrong_answer.view(rows, -1).any(-1)).float().mean())
