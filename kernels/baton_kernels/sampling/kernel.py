"""sampling as Triton kernels: the noise of the Gumbel-max trick (see `reference`) is generated where it is added, and
no row is sorted.

A row is split over several programs, each of which finds the best token of its part; a second kernel picks the best of
these. The thresholds of filtered rows come from `threshold.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launcher import Launcher
from baton_kernels.sampling.reference import IN_PROMPT
from baton_kernels.sampling.threshold import thresholds

if TYPE_CHECKING:
    from baton_kernels.sampling import DrawParams

_TILE = 2048
_NUM_PROGRAMS = 1024  # 8 per SM of an H200, of 8 warps each
_MAX_SPLITS = 64
_ALIGNMENT = 16
"""Triton compiles a separate kernel for addresses that are multiples of this. torch's allocations have a larger one."""
_TOP = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix(x):
    """murmur3's 32-bit finalizer. x: uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _key(seed, position, START: tl.constexpr):
    key = _mix((seed.to(tl.uint32) ^ START) + 0x9E3779B9)
    key = _mix((key ^ (seed >> 32).to(tl.uint32)) + 0x9E3779B9)
    return _mix((key ^ position.to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def _gumbel_noise(tokens, first_key, second_key):
    """As `reference.gumbel_noise`: the same bits, and the same fp32 values up to rounding."""
    bits = _mix(_mix((tokens.to(tl.uint32) * 0x9E3779B1) ^ first_key) + second_key)
    uniform = ((bits & _TOP).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    # -log1p(-u): near 0, where the winners are, use its series, as 1 - u would lose precision.
    series = uniform / 6.0 + 0.2
    series = series * uniform + 0.25
    series = series * uniform + 1.0 / 3.0
    series = series * uniform + 0.5
    series = (series * uniform + 1.0) * uniform
    return -tl.log(tl.where(uniform < 0.0625, series, -tl.log(1.0 - uniform)))


@triton.jit
def _best_logit(row_ptr, vocab_size, first, end, TILE: tl.constexpr):
    """The best token of tiles [first, end) per lane; the lowest of those that tie."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32)
    for tile in range(first, end):
        tokens = tile * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        better = x > best
        best = tl.where(better, x, best)
        best_token = tl.where(better, tokens, best_token)
    return best, best_token


@triton.jit
def _best_noisy(row_ptr, vocab_size, first, end, temperature, threshold, seed, position, TILE: tl.constexpr):
    """As `_best_logit`, for logit / temperature plus noise, among the logits that reach the threshold."""
    first_key, second_key = _key(seed, position, 0x243F6A88), _key(seed, position, 0x13198A2E)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32)
    for tile in range(first, end):
        tokens = tile * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        score = x / temperature + _gumbel_noise(tokens, first_key, second_key)
        better = (score > best) & (x >= threshold)
        best = tl.where(better, score, best)
        best_token = tl.where(better, tokens, best_token)
    return best, best_token


@triton.jit(
    do_not_specialize=["tiles_per_split"],
    do_not_specialize_on_alignment=["rows_ptr", "temperature_ptr", "seed_ptr", "position_ptr", "threshold_ptr"],
)
def _choose_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    threshold_ptr,
    score_ptr,
    token_ptr,
    row_stride,
    vocab_size,
    tiles_per_split,
    DRAWS: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the best score and its token, [num_choices, num_splits], of this program's split of its row."""
    choice = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + choice).to(tl.int64) * row_stride
    first = tl.program_id(1) * tiles_per_split
    end = tl.minimum(first + tiles_per_split, tl.cdiv(vocab_size, TILE))
    if DRAWS:
        temperature = tl.load(temperature_ptr + choice)
        if temperature > 0.0:
            threshold = tl.load(threshold_ptr + choice) if FILTERED else float("-inf")
            seed, position = tl.load(seed_ptr + choice), tl.load(position_ptr + choice)
            best, token = _best_noisy(row_ptr, vocab_size, first, end, temperature, threshold, seed, position, TILE)
        else:
            best, token = _best_logit(row_ptr, vocab_size, first, end, TILE)
    else:
        best, token = _best_logit(row_ptr, vocab_size, first, end, TILE)
    score = tl.max(best, axis=0)
    place = choice * tl.num_programs(1) + tl.program_id(1)
    tl.store(score_ptr + place, score)
    tl.store(token_ptr + place, tl.min(tl.where(best == score, token, _TOP), axis=0))


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(score_ptr, token_ptr, out_ptr, num_splits, MAX_SPLITS: tl.constexpr):
    choice = tl.program_id(0)
    split = tl.arange(0, MAX_SPLITS)
    mask = split < num_splits
    scores = tl.load(score_ptr + choice * num_splits + split, mask=mask, other=float("-inf"))
    tokens = tl.load(token_ptr + choice * num_splits + split, mask=mask, other=_TOP)
    best = tl.max(scores, axis=0)
    tl.store(out_ptr + choice, tl.min(tl.where(scores == best, tokens, _TOP), axis=0))


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "repetition_ptr", "frequency_ptr", "presence_ptr"])
def _penalize_kernel(
    logits_ptr,
    counts_ptr,
    rows_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab_size,
    IN_PROMPT: tl.constexpr,
    TILE: tl.constexpr,
):
    choice = tl.program_id(0)
    repetition = tl.load(repetition_ptr + choice)
    frequency, presence = tl.load(frequency_ptr + choice), tl.load(presence_ptr + choice)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
        row = tl.load(rows_ptr + choice).to(tl.int64)
        counts = tl.load(counts_ptr + row * vocab_size + tokens, mask=tokens < vocab_size, other=0)
        seen = counts != 0  # only a few tokens: the logits of the others are neither read nor written
        places = logits_ptr + choice.to(tl.int64) * vocab_size + tokens
        x = tl.load(places, mask=seen, other=0.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        in_output = counts & (IN_PROMPT - 1)
        x -= frequency * in_output.to(tl.float32) + tl.where(in_output > 0, presence, 0.0)
        tl.store(places, x, mask=seen)


_choose = Launcher(_choose_kernel, num_warps=8)
_combine = Launcher(_combine_kernel, num_warps=1)


def sample(logits: Tensor, rows: Tensor, params: DrawParams | None, filtered: bool) -> Tensor:
    num_choices, vocab_size = rows.shape[0], logits.shape[1]
    tokens = torch.empty(num_choices, dtype=torch.int32, device=logits.device)
    if not num_choices:
        return tokens
    filtered = filtered and params is not None
    num_tiles = triton.cdiv(vocab_size, _TILE)
    tiles_per_split = triton.cdiv(num_tiles, min(_MAX_SPLITS, max(1, _NUM_PROGRAMS // num_choices)))
    num_splits = triton.cdiv(num_tiles, tiles_per_split)
    best_tokens = torch.empty(num_choices, num_splits, dtype=torch.int32, device=logits.device)
    best_scores = torch.empty(num_choices, num_splits, dtype=torch.float32, device=logits.device)
    row_stride = logits.stride(0)
    like = logits.dtype, logits.data_ptr() % _ALIGNMENT, row_stride, vocab_size, params is None, filtered
    _choose(
        like,
        (num_choices, num_splits, 1),
        logits,
        rows,
        None if params is None else params.temperature,
        None if params is None else params.seed,
        None if params is None else params.position,
        thresholds(logits, rows, params) if filtered and params is not None else None,
        best_scores,
        best_tokens,
        row_stride,
        vocab_size,
        tiles_per_split,
        params is not None,
        filtered,
        _TILE,
    )
    _combine(None, (num_choices, 1, 1), best_scores, best_tokens, tokens, num_splits, _MAX_SPLITS)
    return tokens


def penalize(
    logits: Tensor, counts: Tensor, rows: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    num_choices, vocab_size = logits.shape
    if num_choices:
        grid = num_choices, triton.cdiv(vocab_size, _TILE)
        _penalize_kernel[grid](
            logits, counts, rows, repetition, frequency, presence, vocab_size, IN_PROMPT, _TILE, num_warps=8
        )
