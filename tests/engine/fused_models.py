"""Small models with fast modules, and the same models as transformers has them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.accuracy.random_models import MAX_MODEL_LEN, make
from engine.model import fast
from engine.model.attention import IMPLEMENTATION
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.tally import FusedReport
from engine.model.fast.target import Target
from engine.model.probe import Probe, probe

CPU = torch.device("cpu")


def built(family: str, attention: str = IMPLEMENTATION) -> PreTrainedModel:
    return make(family, torch.float32, CPU, attention)


def fused(model: PreTrainedModel) -> tuple[Probe, FusedReport]:
    probed = probe(model, MAX_MODEL_LEN)
    return probed, fast.apply(model, probed, MAX_MODEL_LEN)


def logits(model: PreTrainedModel, probed: Probe) -> Tensor:
    with torch.inference_mode():
        return logits_as_served(Target(model, probed.layers, MAX_MODEL_LEN), probed.kv)


def check_same_as_own(model: PreTrainedModel, probed: Probe, family: str, mutate=lambda model: None) -> None:
    """Logits of the fused model are those of the model as transformers has it, mutated alike."""
    own = built(family)
    mutate(own)
    torch.testing.assert_close(logits(model, probed), logits(own, probe(own, MAX_MODEL_LEN)), atol=1e-4, rtol=1e-4)
