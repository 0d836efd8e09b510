"""What is left for KV blocks, and the steps that are measured for it."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest
import torch

from baton.layout import LayerKv
from engine.config import EngineConfig
from engine.model.kv_pool import KvPool
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.memory import (
    GIB,
    ProfiledMemory,
    grown_by_libraries,
    kv_pool_bytes,
    num_kv_blocks,
    out_of_memory,
    profile,
)
from engine.model.runner import TorchModelRunner
from engine.model.warm_up import first_steps, largest_steps, profile_config
from tests.engine import tiny_models

H200 = ProfiledMemory(
    total=140 * GIB, free=120 * GIB, weights=16 * GIB, libraries=GIB, activations=2 * GIB
)  # a context and others: 3 GiB


def test_the_pool_is_what_the_share_leaves() -> None:
    assert kv_pool_bytes(H200, 0.5, kept_bytes=GIB) == (70 - 16 - 1 - 2 - 1) * GIB
    assert kv_pool_bytes(H200, 0.9, kept_bytes=0) == (126 - 16 - 1 - 2) * GIB


def test_a_context_of_ones_own_is_not_taken_for_another_process() -> None:
    alone = dataclasses.replace(H200, free=int(122.5 * GIB))  # a context: half a GiB
    assert kv_pool_bytes(alone, 1.0, kept_bytes=0) == int(120.5 * GIB)


def test_what_another_process_takes_meanwhile_is_not_ours() -> None:
    assert grown_by_libraries(3 * GIB, 4 * GIB) == GIB
    assert grown_by_libraries(3 * GIB, 2 * GIB) == 0
    assert grown_by_libraries(3 * GIB, 16 * GIB) == 2 * GIB


def test_a_share_that_is_used_up_says_by_what() -> None:
    with pytest.raises(ValueError, match=r"^--gpu-memory-utilization: 0.13 of 140.00 GiB leaves nothing") as error:
        kv_pool_bytes(H200, 0.13, kept_bytes=GIB)
    for part in (
        "weights 16.00 GiB",
        "activations 2.00 GiB",
        "CUDA graphs and slots 1.00 GiB",
        "lower --max-num-batched-tokens",
    ):
        assert part in str(error.value)


def test_others_that_hold_what_should_be_ours_are_told() -> None:
    crowded = dataclasses.replace(H200, free=60 * GIB)
    with pytest.raises(ValueError, match=r"0.9 of 140.00 GiB is 126.00 GiB, but others hold 63.00 GiB") as error:
        kv_pool_bytes(crowded, 0.9, kept_bytes=GIB)
    assert "lower it to 0.55" in str(error.value)
    assert kv_pool_bytes(crowded, 0.55, kept_bytes=GIB) == 57 * GIB


def test_blocks_must_hold_one_request() -> None:
    block_bytes = 2 << 20  # Llama 3.1 8B: 128 KiB a token
    flag = "--gpu-memory-utilization (0.2)"
    limits = EngineConfig(num_blocks=8193, max_model_len=131072, vocab_size=10)
    assert num_kv_blocks(16 * GIB, block_bytes, limits, flag) == 8192
    with pytest.raises(ValueError, match=r"^--max-model-len: a request of 131072 tokens takes 16.00 GiB") as error:
        num_kv_blocks(16 * GIB - 1, block_bytes, limits, flag)
    assert "there are 16.00 GiB: lower it to 131056 or less" in str(error.value)
    assert str(error.value).endswith("or raise --gpu-memory-utilization (0.2)")


def test_blocks_too_large_for_any_request_are_told_apart_from_requests_too_long() -> None:
    limits = EngineConfig(num_blocks=3, max_model_len=131072, vocab_size=10, block_size=65536)
    with pytest.raises(
        ValueError, match=r"^--block-size: a request takes 8.00 GiB of KV blocks, even a short"
    ) as error:
        num_kv_blocks(8 * GIB - 1, 8 * GIB, limits, "--gpu-memory-utilization (0.2)")
    assert "has 65536 tokens, and there are 8.00 GiB: lower it, or raise --gpu-memory-utilization" in str(error.value)


@pytest.mark.parametrize(
    ("budget", "num_seqs", "max_len", "shapes"),
    [
        (2048, 256, 100_000, [[1] * 255 + [2048], [8] * 256, [1] * 255 + [1024]]),
        (8192, 256, 1025, [[1] * 248 + [1024] * 8, [32] * 256, [1] * 255 + [512]]),
        (64, 256, 1000, [[1] * 255 + [64], [1] * 64, [1] * 255 + [32]]),
        (10_000, 4, 101, [[100] * 4, [100] * 4, [1] * 3 + [50]]),
        (1, 1, 2, [[1], [1], [1]]),
    ],
)
def test_the_largest_steps(budget: int, num_seqs: int, max_len: int, shapes: list[list[int]]) -> None:
    config = EngineConfig(
        num_blocks=7000, max_model_len=max_len, vocab_size=9, max_num_batched_tokens=budget, max_num_seqs=num_seqs
    )
    steps = largest_steps(config)
    assert [[chunk.length for chunk in chunks] for chunks in steps] == shapes
    pool = profile_config(config)
    for chunks in steps:
        assert len(chunks) <= num_seqs
        assert sum(chunk.length for chunk in chunks if chunk.length > 1) <= budget
        for chunk in chunks:
            assert chunk.samples_token
            assert max(chunk.sequence.block_table) < pool.num_blocks
            assert chunk.end <= pool.max_model_len < max_len + 1


@pytest.mark.parametrize(("most", "asked"), [(0, 5), (20, 20), (300, 300), (10_000, 1000)])
def test_the_largest_steps_have_as_many_logprobs_as_requests_may_ask_for(most: int, asked: int) -> None:
    config = EngineConfig(num_blocks=99, max_model_len=40, vocab_size=1000, max_num_seqs=5, max_logprobs=most)
    chunks = [chunk for step in largest_steps(config) for chunk in step]
    assert {chunk.sequence.sampling.num_logprobs for chunk in chunks} == {asked}


@pytest.mark.parametrize(
    ("budget", "num_seqs", "max_len"), [(8192, 256, 40_000), (2048, 2, 300), (16, 1, 64), (1, 1, 2), (2, 5, 3)]
)
def test_the_first_steps_are_steps_that_there_may_be(budget: int, num_seqs: int, max_len: int) -> None:
    config = EngineConfig(
        num_blocks=2501, max_model_len=max_len, vocab_size=9, max_num_batched_tokens=budget, max_num_seqs=num_seqs
    )
    steps = first_steps(config)
    assert steps
    for chunks in steps:
        assert sum(chunk.length for chunk in chunks if chunk.length > 1) <= budget
        assert len(chunks) <= num_seqs
        for chunk in chunks:
            assert chunk.samples_token
            assert chunk.end < max_len
            assert max(chunk.sequence.block_table) < config.num_blocks


def test_memory_that_runs_out_ends_in_one_line() -> None:
    with (
        pytest.raises(ValueError, match=r"^--model: too large: Tried to allocate 2 GiB\.$"),
        out_of_memory("--model: too large"),
    ):
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nSee the documentation.")


def test_a_pool_on_a_cpu_takes_memory_only_as_it_is_written() -> None:
    layers, cpu = (LayerKv(8, 128, 128, "float32"),) * 32, torch.device("cpu")
    before = resident_bytes()
    pool = KvPool(layers, num_blocks=512, block_size=16, device=cpu)
    assert pool.tensor.nbytes == 2 * GIB
    pool.tensor[300] = 1.0
    assert resident_bytes() - before < GIB // 4
    assert pool.tensor[::100].sum(dim=(1, 2, 3, 4, 5)).count_nonzero() == 1
    with pytest.raises(ValueError, match=r"^--flag: lower it: no \d+ bytes: "), out_of_memory("--flag: lower it"):
        KvPool(layers, num_blocks=1 << 40, block_size=16, device=cpu)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_the_largest_and_the_first_steps_run(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = loader.load_model(Checkpoint.open(tiny_models.save(tiny_models.CONFIGS["llama"], tmp_path)))
    config = EngineConfig(num_blocks=99, max_model_len=40, vocab_size=160, max_num_batched_tokens=50, max_num_seqs=5)
    runner = TorchModelRunner(model, profile_config(config))
    assert runner.pool.num_blocks == 4
    for chunks in largest_steps(config):
        choices = runner.launch(chunks).wait()
        assert [len(made) for made in choices] == [1] * len(chunks)
        for chunk in chunks:
            runner.forget(chunk.sequence)
    TorchModelRunner(model, config).warm_up()


@pytest.mark.gpu
def test_a_profile_sees_the_peak_and_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    weights = torch.ones(100 << 20, dtype=torch.uint8, device=device)
    scratch = torch.ones(50 << 20, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    outside, libraries = total - free - torch.cuda.memory_reserved(device), 0

    def ours(_: torch.device) -> tuple[int, int]:
        """Others on the GPU come and go."""
        return total - outside - libraries - torch.cuda.memory_reserved(device), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", ours)

    def run() -> None:
        nonlocal libraries
        for size in (10, 300, 20):
            torch.empty(size << 20, dtype=torch.uint8, device=device)
        libraries = 7 << 20

    memory = profile(run, device, scratch.nbytes)
    assert memory.weights == before - scratch.nbytes
    assert memory.activations == 300 << 20
    assert memory.libraries == 7 << 20
    assert memory.total - memory.free >= weights.nbytes
    assert (memory.free, memory.total) == ours(device)


def test_a_block_has_of_each_layer_its_keys_before_its_values() -> None:
    """Other nodes read blocks in this order."""
    pool = KvPool((LayerKv(3, 4, 4, "float32"),) * 2, num_blocks=2, block_size=5, device=torch.device("cpu"))
    for layer in range(2):
        keys, values = pool.layer(layer)
        keys[1], values[1] = 2 * layer + 1, 2 * layer + 2
    assert pool.as_bytes()[1].view(torch.float32).view(4, -1)[:, [0, -1]].tolist() == [[n, n] for n in (1, 2, 3, 4)]
