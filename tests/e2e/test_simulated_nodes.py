"""Simulated nodes as processes, behind a real router: the protocol and the answers are those of nodes with a model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.simulated.profile import load_profile
from tests.e2e.client import Answer, Client
from tests.e2e.cluster import PATIENCE_S, Cluster, wait_whole

pytestmark = pytest.mark.timeout(300)

FLAGS = ("--engine=simulated", "--profile=h200-8b", "--time-scale=0.5", "--num-gpu-blocks-override=9000")
PROMPT = [5 + i % 4000 for i in range(700)]
SPECIAL = {0, 1, 2, 3, 4}


async def test_a_pair_of_simulated_nodes_serves_and_survives_the_decode_nodes_death(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        prefill = cluster.node("prefill", "prefill-0", *FLAGS)
        decode = cluster.node("decode", "decode-0", *FLAGS)
        router = cluster.router([prefill], [decode])
        await asyncio.to_thread(router.wait_ready)
        async with Client(router) as client:
            whole = await client.complete(PROMPT, max_tokens=60, ignore_eos=True)
            check(whole)
            cached = await client.complete(PROMPT, max_tokens=5, ignore_eos=True)
            assert cached.tokens[0] == whole.tokens[0][:5]
            assert cached.usage["prompt_tokens_details"]["cached_tokens"] >= 688
            refused = await client.complete(PROMPT, max_tokens=5, structured_outputs={"regex": "a"})
            assert refused.status == 400
            again = client.begin([*PROMPT, 9], stream=True, max_tokens=110, ignore_eos=True)
            await again.until(20)
            decode.kill()
            decode.start()
            answer = await again.end()
            assert answer.timings["attempts"] > 1
            assert answer.tokens[0] == (await client.complete([*PROMPT, 9], max_tokens=110, ignore_eos=True)).tokens[0]
        await asyncio.to_thread(wait_whole, (prefill, decode))


def check(answer: Answer) -> None:
    """It is of full length, of tokens with a text, and came no faster than the profile says."""
    assert answer.error is None
    assert len(answer.tokens[0]) == 60
    assert not SPECIAL & set(answer.tokens[0])
    step_s = load_profile("h200-8b").step.constant_us * 1e-6 / 0.5
    assert answer.timings["total_ms"] / 1e3 > 59 * step_s


async def test_kv_events_say_what_a_node_holds(tmp_path: Path) -> None:
    """Over ZMQ, in vLLM's form: blocks of the prompt, and on the decode node those of the answer after them."""
    with Cluster(tmp_path) as cluster, zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.bind("tcp://127.0.0.1:*")
        config = {"enable_kv_cache_events": True, "endpoint": socket.getsockopt_string(zmq.LAST_ENDPOINT)}
        flags = (*FLAGS, f"--kv-events-config={json.dumps(config)}", "--served-model-name=big")
        # a socket takes connections, and says what it subscribes to, only while it is polled
        reading = asyncio.create_task(asyncio.to_thread(read_until, socket, len(PROMPT) + 48))
        prefill, decode = (cluster.node(role, f"{role}-0", *flags) for role in ("prefill", "decode"))
        router = cluster.router([prefill], [decode])
        await asyncio.to_thread(router.wait_ready)
        async with Client(router) as client:
            answer = await client.complete(PROMPT, model="big", max_tokens=60, ignore_eos=True, cache_salt="s")
        held = await reading
    tokens = [*PROMPT, *answer.tokens[0]]
    assert held == {"kv@prefill-0@big": PROMPT[:688], "kv@decode-0@big": tokens[: len(held["kv@decode-0@big"])]}


def read_until(socket: zmq.Socket[bytes], num_tokens: int) -> dict[str, list[int]]:
    """The tokens of one chain of blocks by topic, once one of them is so long."""
    held: dict[str, list[int]] = {}
    lasts: dict[str, Any] = {}
    while max(map(len, held.values()), default=0) < num_tokens:
        assert socket.poll(int(PATIENCE_S * 1e3)), held
        topic, _, payload = socket.recv_multipart()
        name = topic.decode()
        for kind, hashes, parent, block_tokens, size, *_, keys in msgspec.msgpack.decode(payload)[1]:
            assert (kind, size) == ("BlockStored", 16)
            assert parent == lasts.get(name)
            assert (keys is None) == (parent is not None)
            held.setdefault(name, []).extend(block_tokens)
            lasts[name] = hashes[-1]
    return held
