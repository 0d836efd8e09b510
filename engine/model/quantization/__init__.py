"""How published checkpoints store quantized weights, and `--quantization`, which quantizes while a model loads.

A format names the tensors that its files contain for a layer, and turns them into a `QuantizedWeight`; from there on
all formats are alike. On a GPU, `QuantizedLinear` keeps the weight quantized. On a CPU, a layer gets the dequantized
weight, which in fp32 is exactly what the files stand for; in bf16, int8 and 4-bit weights may stay packed as well
(`install`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from engine.model.errors import UnsupportedModel
from engine.model.linear_method import Quantization, Unquantized
from engine.model.quantization.auto_round import auto_round
from engine.model.quantization.awq import Awq
from engine.model.quantization.compressed_tensors import CompressedTensors
from engine.model.quantization.fp8 import Fp8
from engine.model.quantization.gptq import Gptq
from engine.model.quantization.mxfp4 import Mxfp4
from engine.model.quantization.online import OnlineFp8, OnlineInt8
from engine.model.safetensors_index import StoredTensor

QUANTIZATIONS: dict[str, Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], Quantization]] = {
    "auto-round": auto_round,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""By the `quant_method` of config.json's `quantization_config`. Each is made from that configuration and the files'
tensors; without tensors, weights are random."""

_MODELOPT = "modelopt"
"""NVIDIA's TensorRT Model Optimizer, which stores FP8 like `fp8`."""
_BITSANDBYTES = "bitsandbytes"
"""transformers knows it by two names, which end in the number of bits."""
_OF_QUANTIZED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks")
_CODES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8"})

STORED = (Awq, CompressedTensors, Fp8, Gptq, Mxfp4)
"""The classes of `QUANTIZATIONS`."""

ONLINE: dict[str, Callable[[], Quantization]] = {"fp8": OnlineFp8, "int8": OnlineInt8}
"""The values of `--quantization`, for a checkpoint that is not quantized."""


def choose_quantization(
    config: Any, stored: Mapping[str, StoredTensor], requested: str | None = None
) -> Quantization | None:
    """The quantization of a checkpoint with this configuration; None: a method that only transformers implements.

    config: transformers' own. stored: the files' tensors. requested: `--quantization`. Raises UnsupportedModel, naming
    what cannot be run.
    """
    stated = stated_quantization(config)
    if stated is None:
        _require_unquantized(stored)
        if requested is None:
            return Unquantized()
        if requested not in ONLINE:
            raise UnsupportedModel(
                f"--quantization {requested}: the checkpoint is not quantized; {_ONLINE_NAMES} can be made"
            )
        return ONLINE[requested]()
    stated = _as_mapping(stated)
    method = str(stated.get("quant_method"))
    if requested not in (None, method):
        raise UnsupportedModel(f"--quantization {requested}: the checkpoint is quantized already, by {method}")
    if method == _MODELOPT and stated.get("quant_algo") == "FP8":
        return Fp8(stated, stored)
    if method in QUANTIZATIONS:
        return _made(method, stated, stored)
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING and method != _BITSANDBYTES:
        known = ", ".join(QUANTIZATIONS)
        raise UnsupportedModel(f"its weights are quantized by {method}, which cannot be run; what can: {known}")
    return None


def _as_mapping(stated: Any) -> Mapping[str, Any]:
    """Raises UnsupportedModel for what neither config.json nor transformers has there."""
    if isinstance(stated, Mapping):
        return stated
    if not hasattr(stated, "to_dict"):
        raise UnsupportedModel(f"its configuration of quantized weights is no object, but {stated!r}")
    found: Mapping[str, Any] = stated.to_dict()
    return found


def _made(method: str, stated: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Quantization:
    """Raises UnsupportedModel, also for values of another type than the format has."""
    try:
        return QUANTIZATIONS[method](stated, stored)
    except UnsupportedModel:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"its quantization_config is not as {method} has it: {error!r}") from error


def stated_quantization(config: Any) -> Any:
    """What a configuration, or its language model's part, states of quantized weights; None: nothing."""
    parts = (config, config.get_text_config())
    found = (getattr(part, name, None) for part in parts for name in ("quantization_config", "compression_config"))
    return next((stated for stated in found if stated), None)


def is_leftover(name: str) -> bool:
    """Whether a tensor of that name belongs to a quantized weight, so that a model which does not use it is wrong."""
    return name.endswith(_OF_QUANTIZED)


def _require_unquantized(stored: Mapping[str, StoredTensor]) -> None:
    """Raises UnsupportedModel."""
    for name, tensor in stored.items():
        if is_leftover(name) or (name.endswith(".weight") and tensor.dtype in _CODES):
            raise UnsupportedModel(f"{name} is {tensor.dtype}, of a quantized weight, but config.json states no format")


_ONLINE_NAMES = " and ".join(ONLINE)
