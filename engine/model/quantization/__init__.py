"""How published checkpoints store quantized weights, and `--quantization`, which quantizes while a model loads.

A format names the tensors that its files have for a layer, and turns them into a `QuantizedWeight`; from there on all
formats are one. On a CPU a layer gets the weight's values in fp32, so that a model computes exactly what its weights
stand for; on a GPU, `QuantizedLinear` keeps them quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.model.errors import UnsupportedModel
from engine.model.linear_method import Quantization, Unquantized
from engine.model.load.safetensors_index import StoredTensor
from engine.model.quantization.awq import Awq
from engine.model.quantization.compressed_tensors import CompressedTensors
from engine.model.quantization.fp8 import Fp8
from engine.model.quantization.gptq import Gptq
from engine.model.quantization.mxfp4 import Mxfp4
from engine.model.quantization.online import OnlineFp8, OnlineInt8

QUANTIZATIONS: dict[str, Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], Quantization]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""By the `quant_method` of config.json's `quantization_config`; each is made from that and the tensors of the files
(none: random weights)."""

ONLINE: dict[str, Callable[[], Quantization]] = {"fp8": OnlineFp8, "int8": OnlineInt8}
"""What `--quantization` can make of a checkpoint that is not quantized."""


def choose_quantization(
    config: Any, stored: Mapping[str, StoredTensor], requested: str | None = None
) -> Quantization | None:
    """The quantization of a checkpoint with this configuration (transformers' own); None: one that is not here.

    stored: its files' tensors. requested: `--quantization`. Raises UnsupportedModel, naming what cannot be run.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        if requested is None:
            return Unquantized()
        if requested not in ONLINE:
            raise UnsupportedModel(
                f"--quantization {requested}: the checkpoint is not quantized; {_ONLINE_NAMES} can be made"
            )
        return ONLINE[requested]()
    stated = dict(stated if isinstance(stated, Mapping) else stated.to_dict())
    method = stated.get("quant_method")
    if requested not in (None, method):
        raise UnsupportedModel(f"--quantization {requested}: the checkpoint is quantized already, by {method}")
    make = QUANTIZATIONS.get(str(method))
    return None if make is None else make(stated, stored)


_ONLINE_NAMES = " and ".join(ONLINE)
