"""Nodes whose ranks have a GPU each: their answers, whatever the degrees of the two, are those of transformers. Their
sums, as kernels and in graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.address import HostPort
from baton.sampling import SamplingParams
from benchmarks import rank_sums
from benchmarks.direct import Direct
from engine.checkpoint import EMBEDDED
from tests.e2e import reference_file
from tests.node.processes import Process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU"),
    pytest.mark.timeout(300),
]

FLAGS = ("--device", "cuda", "--dtype", "float32", "--gpu-memory-utilization", "0.2", "--verify-transfers")
NEAR_TIE = 1e-2


@contextlib.contextmanager
def node(role: str, degree: int, *flags: str) -> Iterator[Process]:
    checkpoint: Path = EMBEDDED["baton-tiny"]
    process = Process.start(f"{role}_node", checkpoint, *FLAGS, "--tensor-parallel-size", str(degree), *flags)
    try:
        yield process
    finally:
        assert process.stop() == 0, "".join(process.lines[-30:])


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"), [(2, 2, "ipc"), (1, 2, "ipc"), (2, 1, "ipc"), (2, 2, "ucx")]
)
async def test_answers_are_those_of_transformers(prefill: int, decode: int, transport: str) -> None:
    """Twice, the second time with prefixes that the prefill node has."""
    known = reference_file.load().of_kind("ids", "text", "shared")
    references = [r for r in known if len(r.prompt) < 1500 and len(r.output) > 1][::4]  # those that are handed off
    carried = "--transport", transport
    with node("prefill", prefill, *carried) as first, node("decode", decode, *carried) as second:
        first.wait_ready()
        second.wait_ready()
        async with Direct(HostPort.parse(first.address), HostPort.parse(second.address)) as client:
            hits = []
            for _ in range(2):
                for reference in references:
                    params = SamplingParams(
                        temperature=0.0, max_tokens=reference.max_tokens, ignore_eos=reference.ignore_eos
                    )
                    _, tokens = await client.generate(reference.prompt, params, "")
                    difference = reference.difference(tokens)
                    assert difference is None or difference.margin < NEAR_TIE, str(difference)
                hits.append(first.metric("baton:prefix_cache_hits_total"))
        assert hits[1] > 2 * hits[0]


def test_sums_of_few_rows_and_in_pieces() -> None:
    """Those that norms make, of one row to several for each program, widths that change between calls, and those of
    products in pieces; op by op and in CUDA graphs. All ranks get the same bits."""
    arguments = ["--widths", "4096,64,2880", "--rows", "1,3,129,1024", "--inputs", "2048", "--prompts", "2048,8100"]
    assert rank_sums.main([*arguments, "--pieces", "1,2,4", "--calls", "3", "--limit-s", "200"]) == 0
