"""Nodes that die or hang in each state of a request: it is answered all the same; nothing leaks."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from tests.e2e.client import Answer, Client
from tests.e2e.cluster import Role
from tests.e2e.scenes import STATES, Director, Fragile, Held, State

pytestmark = pytest.mark.timeout(300)

CI = {  # each victim, with a spare and without; the others run with `-m full`
    ("prefill", "queued", True),
    ("prefill", "prefilling", False),
    ("prefill", "handing_off", True),
    ("decode", "prefilling", True),
    ("decode", "handing_off", False),
    ("decode", "decoding", True),
}
CASES = [
    pytest.param(*case, marks=[] if case in CI else pytest.mark.full)
    for case in product(("prefill", "decode"), STATES, (True, False))
]


@pytest.mark.parametrize(("victim", "state", "spare"), CASES)
async def test_a_node_is_killed(fragile: Fragile, victim: Role, state: State, spare: bool) -> None:
    """Every request is answered in full: by a spare node; by a decode node that stands in for the prefill nodes; and by
    the last decode node's next life, which what it had waits for."""
    router = fragile.all if spare else fragile.pair
    node = fragile.prefill[0] if victim == "prefill" else fragile.decode[0]
    async with Client(router) as client:
        scene = await Director(fragile, router, client, stream=STATES.index(state) % 2 == 0).scene(state)
        node.kill()
        scene.thaw()
        if victim == "decode" and not spare:
            node.start()
        for held in (scene.request, *scene.others):
            check_right(held, await held.request.end())
        was_done = victim == "prefill" and state == "decoding"
        assert (scene.request.request.answer.timings["attempts"] > 1) is not was_done


@pytest.mark.parametrize(("victim", "state"), [("decode", "decoding"), ("prefill", "prefilling")])
async def test_a_node_hangs(fragile: Fragile, victim: Role, state: State) -> None:
    """No connection breaks: its silence tells. When it goes on after all, it drops what it had and takes work again."""
    node = fragile.prefill[0] if victim == "prefill" else fragile.decode[0]
    async with Client(fragile.all) as client:
        scene = await Director(fragile, fragile.all, client, stream=True).scene(state)
        assert scene.frozen == [node]
        answer = await scene.request.request.end()
        check_right(scene.request, answer)
        assert answer.timings["attempts"] == 2
        scene.thaw()
        await fragile.wait_ready()
    async with Client(fragile.pair) as client:
        again = await client.complete([7] * 100, max_tokens=4, ignore_eos=True)
        assert again.timings["attempts"] == 1


async def test_a_constrained_answer_goes_on_where_its_decode_node_died(fragile: Fragile) -> None:
    """The next nodes rebuild what it must match from its tokens."""
    fields: dict[str, Any] = {"guided_regex": "([0-9]{3}-){60}", "max_tokens": 80}
    async with Client(fragile.all) as client:
        whole = await client.complete([7] * 20, **fields)
        request = client.begin([7] * 20, stream=True, **fields)
        await request.until(5)
        busy = [node for node in fragile.decode if node.metric("baton:num_requests_running")]
        busy[0].kill()
        answer = await request.end()
    assert answer.timings["attempts"] == 2
    assert answer.texts[0] == whole.texts[0]
    assert answer.finishes == whole.finishes
    assert re.fullmatch("([0-9]{3}-)*[0-9]{0,3}", answer.texts[0])


def check_right(held: Held, answer: Answer) -> None:
    assert answer.status == 200, answer.error
    assert answer.error is None
    assert answer.done
    assert not held.expected or tuple(answer.tokens[0]) == held.expected
    assert answer.finishes == {0: "length"}
