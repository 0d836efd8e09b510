"""A model class without its weights, and random ones for it.

The class is made on the CPU, where memory that nobody touches costs nothing, with transformers' and torch's
initializers off; then its parameters get memory on the device. Buffers that no checkpoint holds (RoPE's frequencies)
are computed as transformers does it when it loads one, on the CPU in fp32, so that they come out the same to the bit.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

_DUMMY_SEED = 0  # not --seed: nodes of one cluster must have the same weights


def build_skeleton(config: Any, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model of that configuration on the CPU, in eval mode; parameters in memory that nobody has touched.

    Raises what transformers raises for a configuration that it has no model for.
    """
    config = copy.deepcopy(config)  # transformers writes the dtype and the attention into the one that it is given
    auto_class: Any = AutoModelForCausalLM
    with no_init_weights():
        model: Any = auto_class.from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False)
    model.tie_weights()  # left out with the initializers
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # what transformers' initializers leave alone
    model.initialize_weights()
    skeleton: PreTrainedModel = model.eval().requires_grad_(False)
    return skeleton


def move_empty(model: PreTrainedModel, device: torch.device) -> None:
    """Give the state dict's tensors new memory on the device, not what they hold; other buffers move with it."""
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    if device.type == "cpu":  # where it is already
        return
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter, device=device)
    for buffer in model.buffers():
        buffer.data = torch.empty_like(buffer, device=device) if id(buffer) in stored else buffer.to(device)


def fill_with_dummies(model: PreTrainedModel) -> None:
    """Random weights by the model class's own rules (matrices normal, norms one or, where the class adds one, zero),
    drawn on the model's device; the same ones every time there."""
    untouched: list[nn.Module | torch.Tensor] = [*model.modules(), *model.state_dict(keep_vars=True).values()]
    for initialized in untouched:
        vars(initialized).pop("_is_hf_initialized", None)
    for parameter in model.parameters():
        parameter.zero_()  # should the rules leave one out
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(_DUMMY_SEED)
        model.initialize_weights()
