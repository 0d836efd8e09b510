"""The effects on clients of nodes that stop or die: cases of `benchmarks.serving.hostile`."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter

from benchmarks.harness.http_stream import Connection, RequestFailed
from benchmarks.serving.hostile.case import Attack, case, case_with
from benchmarks.serving.hostile.clients import exchange, post
from benchmarks.serving.hostile.watch import get

LOOKED_AT_S = 3.0
NUM_REQUESTS = 40
BODY = json.dumps({"prompt": "abc", "max_tokens": 4, "ignore_eos": True, "timeout": 5}).encode()


@case_with("--decode=2")
async def drain_one_of_two(attack: Attack) -> str:
    """SIGTERM to one of two decode nodes: 40 requests"""
    attack.begin()
    attack.stop("decode-1")
    await asyncio.sleep(0.3)  # lets the node report that it is draining
    attempts, failed = Counter[int](), 0
    async with Connection(attack.http) as connection:
        for _ in range(NUM_REQUESTS):
            try:
                answer = await connection.stream("/v1/completions", {"prompt": "abc", "max_tokens": 4})
                attempts[int(answer.timings.get("attempts", 0))] += 1
            except RequestFailed:
                failed += 1
    status, _ = await get(attack.http, "/ready")
    counts = ", ".join(f"{count} in {number} attempts" for number, count in sorted(attempts.items()))
    return f"{counts}, {failed} failed; /ready {status}"


@case
async def drain_only_decode(attack: Attack) -> str:
    """SIGTERM to the only decode node, with a stream on it"""
    attack.begin()
    attack.stop("decode-0")
    return await _seen(attack)


@case
async def prefill_dead(attack: Attack) -> str:
    """the only prefill node is killed"""
    attack.begin()
    attack.kill("prefill-0")
    return await _seen(attack)


async def _seen(attack: Attack) -> str:
    """The answers of /ready and to requests in the next seconds."""
    ready, answers = Counter[str](), Counter[str]()
    until = time.monotonic() + LOOKED_AT_S
    await asyncio.sleep(0.3)
    while time.monotonic() < until:
        status, text = await get(attack.http, "/ready")
        answer = json.loads(text) if text.startswith("{") else {}
        ready[f"{status} {answer.get('status') or answer.get('error', {}).get('message', '')}"[:90]] += 1
        answers[(await exchange(attack.http, post("/v1/completions", BODY), 10.0))[:60]] += 1
        await asyncio.sleep(0.1)
    return f"/ready {_most(ready)}; requests {_most(answers)}"


def _most(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {what}" for what, count in counts.most_common(2))
