"""Processes that come in any order, do not fit, go, and come back where they were."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, Router, wait_until, wait_whole

pytestmark = pytest.mark.timeout(300)

MISMATCH = "no decode node: LayoutMismatch block_size 16 != 32"


async def test_ready_tells_why_not_until_a_fitting_node_has_come(cluster: Cluster) -> None:
    prefill = cluster.node("prefill", "prefill-0", start=False)
    wrong = cluster.node("decode", "decode-wrong", "--block-size=32", start=False)
    router = cluster.router([prefill], [wrong])
    await told(router, "no prefill node and no decode node", str(prefill.address), str(wrong.address))
    assert router.page("/health").status_code == 200

    prefill.start()
    wrong.start()
    await told(router, MISMATCH)
    async with Client(router) as client:
        answer = await client.complete([5] * 40, max_tokens=4)
        assert answer.status == 503
        assert answer.error
        assert MISMATCH in answer.error["message"]

        assert wrong.terminate() == 0
        prefill.kill()
        await told(router, "no prefill node and no decode node", str(prefill.address), str(wrong.address))
        decode = cluster.same_address(wrong, "decode-0")
        prefill.start()  # its new life, where the old one was, is known as such
        await asyncio.to_thread(router.wait_ready)
        answer = await client.complete([5] * 40, max_tokens=4, ignore_eos=True)
        assert answer.status == 200
        assert (answer.timings["decode_node"], answer.timings["attempts"]) == ("decode-0", 1)

    await asyncio.to_thread(wait_whole, (prefill, decode))
    for node in (prefill, decode):
        assert node.terminate() == 0
    assert router.terminate() == 0


async def told(router: Router, *parts: str) -> None:
    """Until /ready says all this as the reason why not; then it does so as any other 503."""
    answer: httpx.Response

    def why_not() -> str | None:
        nonlocal answer
        answer = router.page("/ready")
        return None if all(part in answer.text for part in parts) else f"/ready says {answer.text}, not {parts}"

    await asyncio.to_thread(wait_until, why_not)
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
