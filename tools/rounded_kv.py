"""transformers' attention over keys and values as a quantized KV cache keeps them, to compare nodes with.

A model loaded with `attn_implementation=ROUNDED_KV` computes plain attention (sdpa) over all keys and values rounded to
8 bits, with a scale for each token and head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from baton_kernels.fp8_kv import dequantize, quantize

ROUNDED_KV = "sdpa_rounded_kv"


def _forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    rounded = (dequantize(*quantize(x), x.dtype) for x in (key, value))
    return sdpa_attention_forward(module, query, *rounded, *args, **kwargs)


AttentionInterface.register(ROUNDED_KV, _forward)
AttentionMaskInterface.register(ROUNDED_KV, sdpa_mask)
