"""A model without its weights, and random weights for it.

The model is built on the CPU, where untouched memory costs nothing, with transformers' and torch's initializers off;
then its parameters get memory on the device. Buffers that no checkpoint holds (RoPE's frequencies) are computed as
transformers does when it loads a checkpoint, on the CPU in fp32, so that they are equal to the bit.
"""

from __future__ import annotations

import copy
import re
import threading
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from engine.model.experts import expert_modules
from engine.model.linear_method import linear_layers
from engine.model.load.supported import auto_class_of
from engine.model.quantization.stored import fill_experts_with_dummies
from engine.model.quantization.stored import fill_with_dummies as quantized_dummies

_BUILDING = threading.Lock()
"""transformers changes torch's initializers for the whole process while it builds a model."""
_DUMMY_SEED = 0  # not --seed: nodes of one cluster must have the same weights


def build_skeleton(config: Any, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model of that configuration on the CPU, in eval mode, with parameters in untouched memory.

    Raises what transformers raises for a configuration without a model, and ValueError for one with sizes of which no
    model can be built.
    """
    config = copy.deepcopy(config)  # transformers writes the dtype and the attention into its argument
    with _BUILDING, no_init_weights():
        try:
            model = _from_config(config, dtype, attention)
        except (ArithmeticError, AssertionError, AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(f"transformers cannot build it from its config.json: {error!r}") from error
    model.tie_weights()  # skipped together with the initializers
    _keep_in_fp32(model, dtype)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # transformers' initializers skip these
    model.initialize_weights()
    skeleton: PreTrainedModel = model.eval().requires_grad_(False)
    return skeleton


def _from_config(config: Any, dtype: torch.dtype, attention: str) -> Any:
    return auto_class_of(config).from_config(
        config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep in fp32 what transformers keeps in fp32 for both 16-bit dtypes: biases for the choice of experts
    (GLM-4.5)."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None)
    if not patterns or dtype not in (torch.float16, torch.bfloat16):
        return
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept.search(name):
            tensor.data = tensor.data.float()


def move_empty(model: nn.Module, device: torch.device) -> None:
    """Give the state dict's tensors new, uninitialized memory on the device; other buffers keep their values. Tensors
    that are on the device already keep their memory."""
    stored = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != device.type:
            tensor.data = torch.empty_like(tensor, device=device) if id(tensor) in stored else tensor.to(device)


def in_parts(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers, and then the model, which contains them: the parts to load one after another, so that
    only one of them has its weights twice at a time."""
    layers = next((module for module in model.modules() if isinstance(module, nn.ModuleList)), ())
    return [*layers, model]


def fill_with_dummies(model: PreTrainedModel) -> None:
    """Draw random weights by the model class's own rules (matrices normal, norms one or, where the class adds one,
    zero), on the model's device; the same every time on one device. Quantized layers and experts get random codes."""
    untouched: list[nn.Module | torch.Tensor] = [*model.modules(), *model.state_dict(keep_vars=True).values()]
    for initialized in untouched:
        vars(initialized).pop("_is_hf_initialized", None)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(_DUMMY_SEED)
        layers = {name: module for name, module in linear_layers(model) if quantized_dummies(module)}
        quantized: list[nn.Module] = [*layers.values()]
        quantized += [module for _, module in expert_modules(model) if fill_experts_with_dummies(module)]
        holders = {name.rpartition(".")[0] for name in layers}  # whose rules may draw their layers' weights (SigLIP)
        for module in [*quantized, *map(model.get_submodule, sorted(holders))]:
            module._is_hf_initialized = True  # transformers' initializers skip it
        filled = {id(parameter) for module in quantized for parameter in module.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in filled:
                parameter.zero_()  # in case the rules leave it out
        model.initialize_weights()
