"""Nodes whose ranks have a GPU each: their answers, however the two divide the model, are those of transformers. Their
sums, as kernels and in graphs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from baton.address import HostPort
from baton.sampling import SamplingParams
from benchmarks.harness.direct import Direct
from benchmarks.layers import rank_sums
from deploy.ports import HeldPort
from engine.checkpoint import EMBEDDED
from tests.e2e import reference_file, references
from tests.e2e.reference_file import Reference
from tests.engine import tiny_models
from tests.node.processes import Process
from tools.quantize import write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU"),
    pytest.mark.timeout(300),
]

TINY, MOE = (EMBEDDED[name] for name in ("baton-tiny", "baton-tiny-moe"))
FLAGS = (
    *("--device=cuda", "--kv-cache-memory-bytes=268435456", "--max-num-seqs=8", "--cudagraph-capture-sizes=1,2,8"),
    "--verify-transfers",
)
"""Small, so that starts are short."""
IN_FP32 = ("--dtype", "float32")
TWO_STAGES = ("--pipeline-parallel-size=2", "--max-num-batched-tokens=64")
"""Prompts of some chunks, so that both stages are busy."""
FOUR, TWO, ONE = (f"--tensor-parallel-size={size}" for size in (4, 2, 1))
FOUR_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="there are no four GPUs")
EOS = (4, 2)
NEAR_TIE = 1e-2
MOE_AGREEMENT, QUANTIZED_AGREEMENT = 0.9, 0.7
"""Of tokens, up to the first other one of each answer: where a router's choice is nearly a tie, or inputs are rounded
to 8 bits, some answers leave their references."""


@contextlib.contextmanager
def node(role: str, checkpoint: Path, *flags: str) -> Iterator[Process]:
    process = Process.start(f"{role}_node", checkpoint, *FLAGS, *flags)
    try:
        yield process
    finally:
        assert process.stop() == 0, "".join(process.lines[-30:])


Answers = list[tuple[int, ...]]


async def answers(
    checkpoint: Path, asked: Sequence[Reference], prefill: Sequence[str], decode: Sequence[str], *flags: str
) -> Answers:
    """To all of them twice, the second time with prefixes that the prefill node has."""
    hits: list[float] = []
    with node("prefill", checkpoint, *prefill, *flags) as first, node("decode", checkpoint, *decode, *flags) as second:
        first.wait_ready()
        second.wait_ready()
        said = await ask_twice(first, second, asked, hits)
    assert hits[1] > 2 * hits[0]
    return said


async def ask_twice(prefill: Process, decode: Process, asked: Sequence[Reference], hits: list[float]) -> Answers:
    """hits: takes the prefill node's hits of its prefix cache after each round."""
    said = Answers()
    async with Direct(HostPort.parse(prefill.address), HostPort.parse(decode.address)) as client:
        for _ in range(2):
            for reference in asked:
                params = SamplingParams(
                    temperature=0.0, max_tokens=reference.max_tokens, ignore_eos=reference.ignore_eos
                )
                _, tokens = await client.generate(reference.prompt, params, "")
                said.append(tokens)
            hits.append(prefill.metric("baton:prefix_cache_hits_total"))
    return said


def check(said: Answers, wanted: Sequence[Reference]) -> None:
    for reference, tokens in zip([*wanted, *wanted], said, strict=True):
        difference = reference.difference(tokens)
        assert difference is None or difference.margin < NEAR_TIE, str(difference)


def agreement(said: Answers, wanted: Sequence[Reference]) -> float:
    same, total = 0, 0
    for reference, tokens in zip([*wanted, *wanted], said, strict=True):
        difference = reference.difference(tokens)
        same += len(reference.output) if difference is None else difference.index
        total += len(reference.output)
    return same / total


@cache
def of_tiny() -> list[Reference]:
    known = reference_file.load().of_kind("ids", "text", "shared")
    return [r for r in known if len(r.prompt) < 1500 and len(r.output) > 1][::4]  # those that are handed off


def made(checkpoint: Path, prompts: Sequence[Sequence[int]], eos: Sequence[int] = ()) -> list[Reference]:
    """What transformers makes of prompts, on a CPU in fp32. eos: where answers end; none: after 16 tokens."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()  # others leave softcaps out, in some versions of transformers
    model.generation_config = GenerationConfig()
    return [references.generate(model, list(eos), "ids", list(prompt), 16, not eos) for prompt in prompts]


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = Random(7)
    return [[rng.randrange(10, 4000) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        ((TWO,), (TWO,), "ipc"),
        ((ONE,), (TWO,), "ipc"),
        ((TWO,), (ONE,), "ipc"),
        ((TWO,), (TWO,), "ucx"),
        (TWO_STAGES, (ONE,), "ipc"),
        (TWO_STAGES, (TWO,), "ucx"),
        pytest.param((FOUR,), (FOUR,), "ipc", marks=FOUR_GPUS),
        pytest.param((ONE,), (FOUR,), "ipc", marks=FOUR_GPUS),
        pytest.param((FOUR,), (TWO,), "ucx", marks=FOUR_GPUS),
        pytest.param((*TWO_STAGES, TWO), (FOUR,), "ipc", marks=FOUR_GPUS),
    ],
)
async def test_answers_are_those_of_transformers(prefill: Sequence[str], decode: Sequence[str], transport: str) -> None:
    check(await answers(TINY, of_tiny(), prefill, decode, *IN_FP32, "--transport", transport), of_tiny())


@pytest.mark.parametrize(("prefill", "decode"), [((TWO,), (TWO,)), (TWO_STAGES, (TWO,)), ((TWO,), (ONE,))])
async def test_a_model_with_windows(prefill: Sequence[str], decode: Sequence[str], tmp_path: Path) -> None:
    """Three KV groups, of which each stage has some layers; prompts end before, at and behind a window of 40."""
    folder = tiny_models.save_windowed(tmp_path / "windowed")
    wanted = made(folder, random_prompts(30, 39, 40, 41, 80, 130, 400))
    check(await answers(folder, wanted, prefill, decode, *IN_FP32, "--transport=ipc"), wanted)


MOVING = '--eplb-config={"window_size": 4, "step_interval": 8, "num_redundant_experts": 4}'


WHOLE = "--enable-expert-parallel"


@pytest.mark.parametrize(
    ("degree", "ways"),
    [
        pytest.param(TWO, (), id="parts"),
        pytest.param(TWO, (WHOLE,), id="whole"),
        pytest.param(TWO, (WHOLE, "--enable-eplb", MOVING), id="moving"),
        pytest.param(FOUR, (WHOLE,), id="whole-4", marks=FOUR_GPUS),
        pytest.param(FOUR, (WHOLE, "--enable-eplb", MOVING), id="moving-4", marks=FOUR_GPUS),
    ],
)
async def test_a_mixture_of_experts(degree: str, ways: Sequence[str]) -> None:
    """With a part of each expert on each rank, with some of them as a whole, and while these change places. Half of the
    prompts are longer than its window of 128."""
    wanted = made(MOE, random_prompts(24, 40, 64, 100, 140, 200, 300, 600))
    flags = (degree, *ways, *IN_FP32, "--transport=ipc")
    with node("prefill", MOE, *flags) as prefill, node("decode", MOE, *flags) as decode:
        prefill.wait_ready()
        decode.wait_ready()
        said = await ask_twice(prefill, decode, wanted, [])
        if MOVING in ways:
            assert decode.metric("baton:expert_rebalances_total")
    assert agreement(said, wanted) > MOE_AGREEMENT


@pytest.mark.parametrize("ways", [TWO_STAGES, (TWO,)], ids=["stages", "ranks"])
async def test_ranks_on_two_hosts(ways: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which sees one GPU."""
    with HeldPort(HostPort("127.0.0.1", 0)) as port, contextlib.ExitStack() as nodes:
        flags, at = (*IN_FP32, "--transport=ucx"), port.address
        meet = ("--nnodes=2", f"--master-addr={at.host}", f"--master-port={at.port}")
        for rank in (1, 0):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
            prefill = nodes.enter_context(node("prefill", TINY, *flags, *ways, *meet, f"--node-rank={rank}"))
        decode = nodes.enter_context(node("decode", TINY, *flags))
        prefill.wait_ready()
        decode.wait_ready()
        check(await ask_twice(prefill, decode, of_tiny(), []), of_tiny())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=FOUR_GPUS)])
async def test_data_parallel_nodes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill nodes with a GPU each divide the experts, and so do decode nodes; all have requests at the same time, and
    stop together."""
    wanted = made(MOE, random_prompts(24, 40, 100, 140, 200, 300))
    with contextlib.ExitStack() as held:
        nodes: dict[str, list[Process]] = {"prefill": [], "decode": []}
        for role, processes in nodes.items():
            at = held.enter_context(HeldPort(HostPort("127.0.0.1", 0))).address
            group = (WHOLE, f"--data-parallel-size={size}", f"--data-parallel-rpc-port={at.port}")
            for rank in range(size):
                gpus = [str((rank + other) % size) for other in range(size)]  # the first is its own
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
                flags = (*IN_FP32, "--transport=ipc", *group, f"--data-parallel-rank={rank}")
                processes.append(held.enter_context(node(role, MOE, *flags)))
        for process in itertools.chain(*nodes.values()):
            process.wait_ready()
        pairs = zip(nodes["prefill"], nodes["decode"], strict=True)
        said = await asyncio.gather(*(ask_twice(*pair, wanted, []) for pair in pairs))
    assert min(agreement(answers, wanted) for answers in said) > MOE_AGREEMENT


async def test_weights_in_8_bits(tmp_path: Path) -> None:
    """Of what transformers makes of the values that they stand for."""
    write(TINY, tmp_path / "quantized", "compressed-fp8")
    write(TINY, tmp_path / "plain", "compressed-fp8", dequantized=True)
    known = [r for r in reference_file.load().of_kind("text") if len(r.prompt) > 20 and r.finish == "stop"]
    wanted = [r for r in made(tmp_path / "plain", [r.prompt for r in known[::3]], EOS) if len(r.output) > 1]
    said = await answers(tmp_path / "quantized", wanted, (TWO,), (TWO,), "--dtype=bfloat16", "--transport=ipc")
    assert agreement(said, wanted) > QUANTIZED_AGREEMENT


@pytest.mark.parametrize("ranks", [TWO, pytest.param(FOUR, marks=FOUR_GPUS)])
async def test_rows_of_long_prompts_are_divided(ranks: str, tmp_path: Path) -> None:
    """In steps as CUDA graphs and op by op."""
    checkpoint = tiny_models.save_wide(tmp_path / "wide")
    wanted = made(checkpoint, random_prompts(1500, 2048, 3301))  # the last has 52 MiB of rows
    flags = (*IN_FP32, "--transport=ipc", "--max-num-batched-tokens=4096")
    said = await answers(checkpoint, wanted, (ranks,), (ranks,), *flags)
    check(said, wanted)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=FOUR_GPUS)])
def test_sums_of_few_rows_and_of_divided_rows(ranks: int) -> None:
    """Those that norms make, of one row to several for each program, widths that change between calls, with four ranks
    in one shot and in two, and those of a layer whose rows are divided; op by op and in CUDA graphs. All ranks get the
    same bits."""
    arguments = ["--ranks", str(ranks), "--widths", "4096,64,2880", "--rows", "1,3,129,300,1024"]
    arguments += ["--prompts", "1024,2048,8100"]
    assert rank_sums.main([*arguments, "--pieces", "1,2,4", "--calls", "3", "--limit-s", "200"]) == 0
