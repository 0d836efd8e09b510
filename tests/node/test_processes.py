"""A prefill node and a decode node as real processes, over real UCX, with a router by hand."""

import signal
import socket
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.messages import Adopted, Started
from baton.sampling import SamplingParams
from tests.node.processes import WAIT_S, Process, Router
from tests.node.tiny_checkpoint import save_tiny

FLAGS = ("--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "64")
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def nodes(checkpoint):
    """(prefill, decode); at the end a signal of either kind has them leave with code 0."""
    started = [Process.fork(module, checkpoint, *FLAGS) for module in ("prefill_node", "decode_node")]
    try:
        for process in started:
            process.wait_ready()
        yield started
    finally:
        numbers = (signal.SIGHUP, signal.SIGINT)
        codes = [process.stop(number) for process, number in zip(started, numbers, strict=True)]
    assert codes == [0, 0], "".join(started[0].lines + started[1].lines)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (length,), generator=generator).tolist()


def reference(checkpoint, tokens: list[int], count: int) -> list[int]:
    model: Any = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    out = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("length", [1, 16, 150])
async def test_a_handed_off_request_gives_the_tokens_of_the_reference(nodes, checkpoint, length):
    async with Router(nodes[0].address, nodes[1].address, epoch=length) as router:
        tokens, _ = await router.run("r", prompt(length), GREEDY)
        assert tokens == reference(checkpoint, prompt(length), GREEDY.max_tokens)
    for process in nodes:
        assert process.page("/integrity") == "ok\n"


async def test_the_second_time_both_prefix_caches_help(nodes):
    async with Router(nodes[0].address, nodes[1].address, epoch=1000) as router:
        first, _ = await router.run("a", prompt(100, seed=5), GREEDY)
        second, updates = await router.run("b", prompt(100, seed=5), GREEDY)
        alone, _ = await router.run("c", prompt(100, seed=5), GREEDY, alone=True)
        assert first == second == alone
        kinds = [update.kind for update in updates]
        assert next(k for k in kinds if isinstance(k, Started)).num_cached_tokens == 96
        adopted = next(k for k in kinds if isinstance(k, Adopted))
        assert adopted.num_cached_tokens == 96
        assert adopted.transfer_bytes == router.decode.info.layout.block_bytes


async def test_numbers_are_there_for_whoever_scrapes(nodes):
    p, d = nodes
    assert p.metric("baton:node_prompt_tokens_total") > 0
    assert d.metric("baton:kv_transfer_bytes_total") > 0
    assert d.metric("baton:node_generation_tokens_total") > 0
    for process in nodes:
        assert process.metric("baton:kv_blocks") == 64
        assert process.page("/health") == "ok\n"


def test_a_healthy_start_warns_of_nothing(nodes):
    lines = [line for process in nodes for line in process.lines]
    assert [line for line in lines if "level=info" not in line] == []


def test_a_start_that_cannot_work_ends_with_one_line(checkpoint, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        busy = Process.fork("decode_node", checkpoint, "--listen", address)
        missing = Process.fork("prefill_node", tmp_path)
        assert [busy.popen.wait(WAIT_S), missing.popen.wait(WAIT_S)] == [1, 1]
        busy.stop()
        missing.stop()
    assert busy.lines == [f"baton-decode: --listen: cannot listen on {address}: Address already in use\n"]
    (line,) = missing.lines
    assert line.startswith(f"baton-prefill: --model {tmp_path}")
