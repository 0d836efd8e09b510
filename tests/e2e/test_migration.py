"""Running requests move from a decode node that leaves to another one, with their KV."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.cluster import Cluster, Router, wait_whole

pytestmark = pytest.mark.timeout(300)

LENGTH = 120
PROMPTS = [[5 + (7 * i + j) % 200 for j in range(20 + 9 * i)] for i in range(8)]
MOVED_AFTER = 15


def fields_of(i: int) -> dict[str, Any]:
    """Half are greedy, of these half with penalties; the rest is sampled."""
    sampled = {"temperature": 0.9, "seed": i}
    kinds: list[dict[str, Any]] = [{}, sampled, {"presence_penalty": 0.6}, sampled | {"top_p": 0.9}]
    return {"stream": True, "max_tokens": LENGTH, "ignore_eos": True} | kinds[i % 4]


def longest_gap_ms(answer: Answer) -> float:
    return 1e3 * max(b - a for a, b in itertools.pairwise(answer.came))


def migrations(router: Router, outcome: str) -> float:
    return router.metric("baton:migrations_total", outcome=outcome)


async def test_a_node_that_is_told_to_stop_hands_its_streams_over(cluster: Cluster) -> None:
    prefill = cluster.node("prefill", "prefill-0")
    decodes = [cluster.node("decode", f"decode-{i}", *flags) for i, flags in enumerate(((), ("--async-scheduling",)))]
    router = cluster.router([prefill], decodes)
    await asyncio.to_thread(router.wait_ready)
    await asyncio.to_thread(router.wait_nodes, 1, 2)
    async with Client(router) as client:
        undisturbed = [client.begin(prompt, **fields_of(i)) for i, prompt in enumerate(PROMPTS)]
        wanted = [await request.end() for request in undisturbed]
        num_prompt_tokens = prefill.metric("baton:node_prompt_tokens_total")

        requests = [client.begin(prompt, **fields_of(i)) for i, prompt in enumerate(PROMPTS)]
        for request in requests:
            await request.until(MOVED_AFTER)
        staying, leaving = sorted(decodes, key=lambda node: node.metric("baton:num_requests_running"))
        num_running = leaving.metric("baton:num_requests_running")
        assert await asyncio.to_thread(leaving.terminate) == 0
        left_after = [len(request.answer.tokens[0]) for request in requests]
        answers = [await request.end() for request in requests]

    num_moved = migrations(router, "moved")
    assert num_moved == num_running >= len(requests) / 2
    assert migrations(router, "lost") == 0
    assert max(left_after) < LENGTH, "streams had ended before the node left"
    for answer, undisturbed_answer in zip(answers, wanted, strict=True):
        assert answer.error is None
        assert answer.tokens[0] == undisturbed_answer.tokens[0]
        assert answer.texts[0] == undisturbed_answer.texts[0]
        assert answer.timings["attempts"] == 1
    assert {answer.timings["decode_node"] for answer in answers} == {staying.name}
    assert sum(answer.timings["moves"] for answer in answers) == num_moved
    again = prefill.metric("baton:node_prompt_tokens_total") - num_prompt_tokens
    assert again == sum(map(len, PROMPTS)), "a prompt was computed again"
    assert staying.metric("baton:node_prompt_tokens_total") == 0
    await asyncio.to_thread(wait_whole, (prefill, staying))
    print(f"moved {num_moved:g} of {len(requests)}, stayed {migrations(router, 'stayed'):g}")
    print("longest gaps, ms: undisturbed", [round(longest_gap_ms(answer)) for answer in wanted])
    print("longest gaps, ms: one node left", [round(longest_gap_ms(answer)) for answer in answers])
