"""Root mean square normalisation of rows, optionally after adding a residual."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_kernels.quantized_linear import with_quantized_rows
from baton_kernels.quantized_linear.tiling import WEIGHT_ONLY_ROWS
from baton_kernels.rms_norm import reference
from baton_kernels.unfinished import finished, left_of


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    round_once: bool = False,
    quantize: torch.dtype | None = None,
) -> Tensor:
    """Return `x / sqrt(mean(x**2) + eps) * (weight + weight_offset)` over the last dimension, contiguous, of x's dtype.

    x: [..., n], the last dimension contiguous; contiguous as a whole, or a [num_tokens, n] or [num_tokens, num_heads,
        n] view with any strides (leading dimensions of size 1 are ignored). What was left to the norm
        (`baton_kernels.unfinished`) is done first.
    weight: [n], contiguous.
    residual: of x's shape and dtype, contiguous; becomes `residual + x`, rounded to the dtype, which is then
        normalised.
    weight_offset: 1.0 for Gemma, whose checkpoints store the weight minus 1.
    round_once: multiply by the weight in fp32 (OLMo 2, gpt-oss; Gemma, as a nonzero offset implies it). Otherwise the
        normalised row is rounded to the dtype first, as in Llama and most others.
    quantize: float8_e4m3fn or int8: on a GPU, a result of more than a few rows also carries its rows quantized to that
        dtype (`quantized_linear.quantized_rows`).
    """
    n = weight.shape[0]
    round_once = round_once or weight_offset != 0.0
    assert x.shape[-1] == n
    assert x.stride(-1) == 1
    assert weight.is_contiguous()
    assert round_once or weight.dtype == x.dtype
    if residual is not None:
        assert residual.shape == x.shape
        assert residual.dtype == x.dtype
        assert residual.is_contiguous()
    if x.is_cuda:
        from baton_kernels.rms_norm import kernel

        num_rows, left = x.numel() // n, left_of(x)
        if quantize is None or num_rows <= WEIGHT_ONLY_ROWS:
            return kernel.rms_norm(x, weight, eps, residual, weight_offset, round_once, left=left)
        values = torch.empty((num_rows, n), dtype=quantize, device=x.device)
        quantized = values, torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
        out = kernel.rms_norm(x, weight, eps, residual, weight_offset, round_once, quantized, left)
        return with_quantized_rows(out, quantized)
    return reference.rms_norm(finished(x), weight, eps, residual, weight_offset, round_once)
