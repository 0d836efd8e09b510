"""The small kernels go through Triton's compiler to a Hopper binary, in the shapes of serving, with no GPU here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from baton_kernels.fp8_kv import elements_of, head_bytes
from baton_kernels.unfinished import ChosenParts, Scales


@pytest.mark.timeout(300)  # 40 s of one core, which others may want
def test_small_kernels_compile_for_hopper() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_compiling"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 168


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def launch_norms_and_gates() -> None:
    from baton_kernels.all_reduce_rms_norm import NUM_PROGRAMS, PeerMemory
    from baton_kernels.all_reduce_rms_norm.kernel import all_reduce_rms_norm
    from baton_kernels.gated_activation import ACTIVATIONS
    from baton_kernels.gated_activation.kernel import gated_activation
    from baton_kernels.reduce_rms_norm import Parts
    from baton_kernels.reduce_rms_norm.kernel import reduce_rms_norm, wait_for_flags
    from baton_kernels.rms_norm.kernel import rms_norm

    rms_norm(bf16(2, 4096), bf16(4096), 1e-5, bf16(2, 4096), 0.0, False)
    rms_norm(bf16(2, 4096)[:, 512:1536].view(2, 8, 128), bf16(128), 1e-5, None, 1.0, True)
    quantized = ints(2, 4096, dtype=torch.int8).view(torch.float8_e4m3fn), torch.zeros(2, 1)
    for size in (2, 8):
        peers = PeerMemory(1, size, ints(size), ints(NUM_PROGRAMS, dtype=torch.int32))
        all_reduce_rms_norm(bf16(2, 4096), bf16(4096), 1e-5, peers, bf16(2, 4096), 0.0, False, quantized)
        all_reduce_rms_norm(bf16(2, 2880), bf16(2880), 1e-5, peers, None, 1.0, True)
    for width, rows in ((8192, 64), (2880, 300)):
        peers = PeerMemory(3, 4, ints(4), ints(NUM_PROGRAMS, dtype=torch.int32))
        assert peers.share_bytes(2 * width) < 2 * width
        all_reduce_rms_norm(bf16(rows, width), bf16(width), 1e-5, peers, bf16(rows, width), 0.0, False)
    for size in (2, 4):
        flags = ints(size - 1, dtype=torch.int32)
        parts = Parts(bf16(2, 8192), bf16(size - 1, 2, 8192), flags, 1)
        reduce_rms_norm(parts, bf16(8192), 1e-5, bf16(2, 8192), bf16(2, 8192), 0.0, False)
        reduce_rms_norm(parts, bf16(8192), 1e-5, bf16(2, 8192), None, 1.0, True)
        wait_for_flags(flags, flags)
    for width, slots, own in ((2048, None, None), (4096, ints(2), quantized), (8192, ints(2), None)):
        chosen = ChosenParts(bf16(16, width), ints(2, 8), slots, 128)
        rms_norm(bf16(2, width), bf16(width), 1e-5, bf16(2, width), 0.0, False, own, chosen)
    for activation in ACTIVATIONS:
        gated_activation(bf16(2, 2 * 1100), activation)


def caches(kv_heads: int, dim: int, quantized: bool) -> tuple[Tensor, Tensor]:
    """Of the second layer of two."""
    if quantized:
        pool = elements_of(ints(3, 2, 2, kv_heads, head_bytes(16, dim), dtype=torch.uint8), 16, dim)
    else:
        pool = bf16(3, 2, 2, kv_heads, 16, dim)
    return pool[:, 1, 0], pool[:, 1, 1]


def launch_rope(dim: int, rotary_dim: int, interleaved: bool, with_norm: bool, quantized: bool = False) -> None:
    from baton_kernels.kv_write.kernel import kv_write
    from baton_kernels.kv_write.reference import HeadNorm
    from baton_kernels.kv_write.rope_kernel import rope_kv_write

    query, key, value = (t.unflatten(1, (-1, dim)) for t in bf16(2, 48 * dim).split([32 * dim, 8 * dim, 8 * dim], 1))
    keys, values = caches(8, dim, quantized)
    norm = HeadNorm(bf16(dim), bf16(dim), 1e-6, 0.0, False) if with_norm else None
    table = bf16(2, rotary_dim)
    rope_kv_write(query, key, value, table, table, keys, values, ints(2), interleaved, norm)
    if with_norm:
        kv_write(key, value, keys, values, ints(2))


def launch_moves_and_inputs() -> None:
    from baton_kernels.block_checksum.kernel import block_checksums
    from baton_kernels.block_copy.kernel import copy_blocks, gather_blocks
    from baton_kernels.fp8_kv.move_kernel import move
    from baton_kernels.host_copy.kernel import host_copy
    from baton_kernels.step_inputs.kernel import step_inputs, update_block_tables
    from baton_kernels.token_mask.kernel import apply_token_masks

    copy_blocks(bf16(4, 4096), ints(2), ints(2))
    gather_blocks(ints(4, 4098, dtype=torch.uint8), ints(2), ints(2, 4098, dtype=torch.uint8))
    gather_blocks(ints(4, 4096, dtype=torch.uint8)[:, 1024:2048], ints(2), ints(2, 1024, dtype=torch.uint8))
    for gathers in (True, False):
        move(gathers, ints(2), bf16(4, 3 * 16 * 128), ints(2, 3, head_bytes(16, 128), dtype=torch.uint8), 16, 128)
    block_checksums(ints(4, 4096, dtype=torch.uint8)[:, 1024:2048], ints(2))
    block_checksums(ints(4, 1000, dtype=torch.uint8), None)
    rows, tables = ints(3, dtype=torch.int32), ints(3, 40, dtype=torch.int32)
    step_inputs(rows, rows, rows, rows, tables, 16, ints(3), ints(3))
    update_block_tables(tables, ints(3), rows)
    host_copy(ints(3), ints(3))
    apply_token_masks(ints(3, 1000, dtype=torch.float32), ints(3), ints(3, 32, dtype=torch.int32))


def launch_matmuls() -> None:
    from baton_kernels.linear.kernel import few_rows
    from baton_kernels.linear.many_rows import many_rows
    from baton_kernels.linear.tiling import WideTiling, choose

    plain, gated = ((1, 6144), (8, 4096), (8, 8192), (16, 4096)), ((1, 2048), (8, 4096), (32, 28672), (128, 28672))
    for activation, shapes in ((None, plain), ("silu", gated)):
        for num_rows, out_features in shapes:
            tiling = choose(num_rows, out_features, 1024, activation is not None, 132)
            assert tiling is not None
            assert not isinstance(tiling, WideTiling)
            few_rows(bf16(num_rows, 1024), bf16(out_features, 1024), None, activation, tiling)
    for num_rows in (1, 8):  # columns that fill no step
        tiling = choose(num_rows, 5120, 2880, False, 132)
        assert tiling is not None
        assert not isinstance(tiling, WideTiling)
        few_rows(bf16(num_rows, 2880), bf16(5120, 2880), bf16(5120), None, tiling)
    wide = choose(2048, 28672, 1024, True, 132)
    assert isinstance(wide, WideTiling)
    many_rows(bf16(2048, 1024), bf16(28672, 1024), "silu", wide, 132)


def launch_quantized() -> None:
    from baton_kernels.quantized_linear import QuantizedWeight
    from baton_kernels.quantized_linear.dequantize_kernel import dequantize, dequantize_four_bits
    from baton_kernels.quantized_linear.four_bits import arrange
    from baton_kernels.quantized_linear.four_bits_kernel import few_rows as arranged_few_rows
    from baton_kernels.quantized_linear.kernel import few_rows
    from baton_kernels.quantized_linear.quantize_rows_kernel import quantize_rows
    from baton_kernels.quantized_linear.tiling import choose, choose_four_bits
    from baton_kernels.rms_norm.kernel import rms_norm

    fp8, scale = torch.float8_e4m3fn, torch.zeros(4096, 1)
    groups, zeros = torch.zeros(4096, 8, dtype=torch.float16), ints(4096, 8, dtype=torch.uint8)
    eight = QuantizedWeight(ints(4096, 1024, dtype=torch.int8).view(fp8), scale)
    integers = QuantizedWeight(ints(4096, 1024, dtype=torch.int8), scale)
    four = QuantizedWeight(ints(4096, 512, dtype=torch.uint8), groups, None, 128)
    four_with_zeros = QuantizedWeight(four.values, groups, zeros, 128)
    for weight in (eight, four, four_with_zeros):
        dequantize(weight, torch.bfloat16)
    for num_rows, activation in ((1, None), (1, "silu"), (128, None)):
        tiling = choose_four_bits(num_rows, 4096, 1024, activation is not None, 256)
        assert tiling is not None
        few_rows(bf16(num_rows, 1024), None, four_with_zeros, None, activation, tiling, torch.bfloat16)
    arranged = arrange(four_with_zeros)
    dequantize_four_bits(arranged, torch.bfloat16)
    for num_rows in (3, 16, 20, 64, 200):
        arranged_few_rows(bf16(num_rows, 1024), arranged, bf16(4096))
    for num_rows in (3, 64, 200):
        arranged_few_rows(bf16(num_rows, 1024).half(), arranged, None, "silu")
    tiling = choose(8, 4096, 1024, False, 0)
    assert tiling is not None
    few_rows(bf16(8, 1024), None, eight, bf16(4096), None, tiling, torch.bfloat16)
    tiling = choose(32, 4096, 1024, False, 0)
    assert tiling is not None
    for weight in (eight, integers):
        x = quantize_rows(bf16(32, 1024), None, weight.values.dtype)
        few_rows(*x, weight, None, None, tiling, torch.bfloat16)
    for features in (4096, 6144):
        tiling = choose(256, features, 1024, False, 0)
        assert tiling is not None
        wide = QuantizedWeight(ints(features, 1024, dtype=torch.int8).view(fp8), torch.zeros(features, 1))
        few_rows(*quantize_rows(bf16(256, 1024), None, fp8), wide, None, None, tiling, torch.bfloat16)
    quantize_rows(bf16(32, 2048), "silu", fp8)
    quantized = ints(2, 4096, dtype=torch.int8).view(fp8), torch.zeros(2, 1)
    rms_norm(bf16(2, 4096), bf16(4096), 1e-5, bf16(2, 4096), 0.0, False, quantized)
    scales = Scales(torch.zeros(2, 1), torch.zeros(4096))
    rms_norm(bf16(2, 4096), bf16(4096), 1e-5, bf16(2, 4096), 0.0, False, quantized, scales)


def launch_four_bits_in_fp32() -> None:
    from baton_kernels.quantized_linear import QuantizedWeight, _tiling
    from baton_kernels.quantized_linear.kernel import few_rows

    weight = QuantizedWeight(ints(4096, 512, dtype=torch.uint8), torch.zeros(4096, 8), None, 128)
    x = torch.zeros(64, 1024)
    tiling = _tiling(x, weight, gated=True)
    assert tiling is not None
    few_rows(x, None, weight, None, "silu", tiling, x.dtype)


def launch_eight_bits_with_more_scales() -> None:
    from baton_kernels.quantized_linear import QuantizedWeight, _tiling
    from baton_kernels.quantized_linear.kernel import few_rows

    in_groups = QuantizedWeight(ints(4096, 1024, dtype=torch.int8), torch.zeros(4096, 8), None, 128)
    with_zeros = QuantizedWeight(ints(4096, 8192, dtype=torch.int8), torch.zeros(4096, 1), ints(4096, 1).byte())
    for num_rows, width, weight in ((256, 1024, in_groups), (128, 8192, with_zeros), (256, 8192, with_zeros)):
        tiling = _tiling(bf16(num_rows, width), weight, gated=False)
        assert tiling is not None
        few_rows(bf16(num_rows, width), None, weight, None, None, tiling, torch.bfloat16)


def launch_experts() -> None:
    from baton_kernels.experts import ExpertWeights, Routing, on_gpu
    from baton_kernels.experts.routing_kernel import route, route_few

    route_few(bf16(3, 2048), bf16(128, 2048), None, Routing(8), None, torch.bfloat16, torch.bfloat16)
    for routing in (
        Routing(8, normalized=True),
        Routing(8, "sigmoid", True, 2.5, 1e-20, 8, 4),
        Routing(4, "chosen_softmax"),
    ):
        route(bf16(3, 128), routing, bf16(128) if routing.scores == "sigmoid" else None, torch.bfloat16)
    plain = ExpertWeights(bf16(32, 2 * 768, 2048), bf16(32, 2048, 768))
    biased = ExpertWeights(bf16(8, 2 * 96, 96), bf16(8, 96, 96), "clamped", True, bf16(8, 2 * 96), bf16(8, 96))
    for num_tokens in (1, 16, 1500):
        on_gpu(bf16(num_tokens, 2048), ints(num_tokens, 8), bf16(num_tokens, 8), plain, None)
    for num_tokens in (2, 8, 300):
        on_gpu(bf16(num_tokens, 96), ints(num_tokens, 4), bf16(num_tokens, 4), biased, ints(num_tokens))
    values = ints(8, 2 * 128, 128, dtype=torch.int8).view(torch.float8_e4m3fn)
    down = ints(8, 128, 128, dtype=torch.int8).view(torch.float8_e4m3fn)
    scales = torch.zeros(8, 2 * 128), torch.zeros(8, 128)
    eight = ExpertWeights(values, down, gate_up_scale=scales[0], down_scale=scales[1])
    for num_tokens in (8, 300):
        on_gpu(bf16(num_tokens, 128), ints(num_tokens, 2), bf16(num_tokens, 2), eight, None)
    in_blocks_of_128 = replace(eight, gate_up_scale=torch.zeros(8, 2, 1), down_scale=torch.zeros(8, 1, 1))
    for num_tokens in (1, 300):
        on_gpu(bf16(num_tokens, 128), ints(num_tokens, 2), bf16(num_tokens, 2), in_blocks_of_128, None)
    codes = ints(32, 5760, 1440, dtype=torch.uint8), ints(32, 2880, 1440, dtype=torch.uint8)
    exponents = ints(32, 5760, 90, dtype=torch.uint8), ints(32, 2880, 90, dtype=torch.uint8)
    biases = bf16(32, 5760), bf16(32, 2880)
    four = ExpertWeights(*codes, "clamped", True, *biases, gate_up_scale=exponents[0], down_scale=exponents[1])
    for num_tokens in (1, 16, 4096):
        on_gpu(bf16(num_tokens, 2880), ints(num_tokens, 4), bf16(num_tokens, 4), four, None)
    codes = ints(128, 1536, 1024, dtype=torch.uint8), ints(128, 2048, 384, dtype=torch.uint8)
    words = ints(128, 1536, 16, dtype=torch.int32), ints(128, 2048, 6, dtype=torch.int32)
    integers = ExpertWeights(*codes, gate_up_scale=words[0], down_scale=words[1])
    for num_tokens in (1, 4096):
        on_gpu(bf16(num_tokens, 2048), ints(num_tokens, 8), bf16(num_tokens, 8), integers, None)
    words = ints(32, 5760, 23 * 16, dtype=torch.int32), ints(32, 2880, 23 * 16, dtype=torch.int32)
    steps = ints(32, 23, 5760, dtype=torch.int32), ints(32, 23, 2880, dtype=torch.int32)
    arranged = ExpertWeights(*words, "clamped", True, *biases, gate_up_scale=steps[0], down_scale=steps[1])
    plain = ExpertWeights(*words, gate_up_scale=steps[0], down_scale=steps[1])
    for num_tokens in (1, 4096):
        on_gpu(bf16(num_tokens, 2880), ints(num_tokens, 4), bf16(num_tokens, 4), arranged, None)
    on_gpu(bf16(12, 2880), ints(12, 4), bf16(12, 4), plain, ints(12))


def launch_attention(quantized: bool) -> None:
    from baton_kernels.paged_attention import PagedBatch, decode
    from baton_kernels.paged_attention.decode import decode_attention
    from baton_kernels.paged_attention.gather import gather
    from baton_kernels.paged_attention.prefill import prefill_attention
    from baton_kernels.paged_attention.tile import scoring

    batch = PagedBatch.build([[1], [2]], [1, 3], [3, 4], 16, torch.device("cpu"))
    keys, values = caches(2, 128, quantized)
    query, out, how = bf16(4, 8, 128), bf16(4, 8, 128), scoring(0.1, None, None)
    decode_attention(query, keys, values, batch, out, how, None)
    if quantized:
        for dim in decode.DIRECT_HEAD_DIMS:
            launch_direct_decode(dim)
    prefill_attention(query, keys, values, batch, range(1, 2), out, how, None)
    gather(keys, values, batch, 1, 0, 4, bf16(4, 2, 128), bf16(4, 2, 128))


def launch_prefill_of_wide_heads() -> None:
    from baton_kernels.paged_attention import PagedBatch
    from baton_kernels.paged_attention.prefill import prefill_attention
    from baton_kernels.paged_attention.tile import scoring

    batch = PagedBatch.build([[1] * 4], [64], [64], 16, torch.device("cpu"))
    query, out = bf16(64, 2, 512), bf16(64, 2, 512)
    prefill_attention(query, *caches(2, 512, quantized=False), batch, range(1), out, scoring(0.1, None, None), None)


def launch_direct_decode(dim: int) -> None:
    from baton_kernels.paged_attention import PagedBatch, decode
    from baton_kernels.paged_attention.tile import scoring

    batch = PagedBatch.build([[1]], [1], [3], 16, torch.device("cpu"))
    keys, values = caches(2, dim, quantized=True)
    query, out = bf16(1, 8, dim), bf16(1, 8, dim)
    with patch.object(decode, "_is_direct", lambda query, cache: True):
        decode.decode_attention(query, keys, values, batch, out, scoring(0.1, 5, 2.0), bf16(8))


def main() -> None:
    from tests.kernels.gpu_compiler import compiled_launches

    with compiled_launches() as names:
        launch_norms_and_gates()
        launch_rope(128, 128, interleaved=False, with_norm=False)
        launch_rope(128, 128, interleaved=False, with_norm=True)
        launch_rope(80, 32, interleaved=True, with_norm=True)
        launch_rope(128, 96, interleaved=False, with_norm=True, quantized=True)
        launch_moves_and_inputs()
        launch_matmuls()
        launch_quantized()
        launch_four_bits_in_fp32()
        launch_eight_bits_with_more_scales()
        launch_experts()
        launch_attention(quantized=False)
        launch_attention(quantized=True)
        launch_prefill_of_wide_heads()
    print(len(names))


if __name__ == "__main__":
    main()
