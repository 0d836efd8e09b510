"""`best_of`: the likeliest of several answers."""

from __future__ import annotations

import pytest

from baton.messages import TokenLogprobs
from router.http.best_of import likeliest
from router.text.answer import Delta


def answer(index: int, *logprobs: float) -> Delta:
    return Delta(index, f"text {index}", tuple(range(len(logprobs))), tuple(map(TokenLogprobs, logprobs)))


def kept(answers: list[Delta], num_drawn: int, num_kept: int) -> list[tuple[int, str]]:
    """Each answer came in two deltas."""
    halves = [[Delta(one.index, ""), one] for one in answers]
    drawn = likeliest(halves, num_drawn, num_kept)
    assert all(first.index == second.index for first, second in drawn)
    return [(delta.index, delta.text) for _, delta in drawn]


def test_the_mean_of_a_tokens_logprob_counts_and_not_the_sum():
    answers = [answer(0, -1.0), answer(1, -0.5, -0.6, -0.7), answer(2, -3.0)]
    assert kept(answers, 3, 1) == [(0, "text 1")]
    assert kept(answers, 3, 2) == [(0, "text 1"), (1, "text 0")]


def test_each_prompt_has_its_own_best_answers_and_equal_ones_keep_their_order():
    answers = [answer(0, -2.0), answer(1, -1.0), answer(2, -1.0), answer(3, -1.0), answer(4), answer(5, -9.0)]
    assert kept(answers, 3, 2) == [(0, "text 1"), (1, "text 2"), (2, "text 4"), (3, "text 3")]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_the_client_gets_n_of_the_answers_drawn_and_pays_for_all(client, nodes, path):
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path.startswith("chat") else {"prompt": ["x", "y"]}
    num_prompts = len(prompt.get("prompt", "1"))
    plain = (await client.post(f"/v1/{path}", json={**prompt, "n": 2})).json()
    body = (await client.post(f"/v1/{path}", json={**prompt, "n": 2, "best_of": 5})).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * num_prompts))
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] * 2 == plain["usage"]["completion_tokens"] * 5
    drawn = [prefill for prefill in nodes.prefills if prefill.sampling.num_logprobs >= 0]
    assert [(prefill.sampling.num_logprobs, len(prefill.samples)) for prefill in drawn] == [(0, 5)] * num_prompts


async def test_an_echo_comes_before_each_answer_that_is_kept(client):
    asked = {"prompt": ["x", "yy"], "n": 2, "best_of": 3, "echo": True, "logprobs": 1}
    choices = (await client.post("/v1/completions", json=asked)).json()["choices"]
    assert [choice["text"][: 1 + (i > 1)] for i, choice in enumerate(choices)] == ["x", "x", "yy", "yy"]
    assert all(choice["logprobs"]["top_logprobs"] for choice in choices)


async def test_the_best_answers_cannot_be_streamed(client):
    for asked in ({"best_of": 2}, {"n": 2, "best_of": 3}):
        response = await client.post("/v1/completions", json={"prompt": "x", "stream": True, **asked})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "best_of"
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": True, "n": 2, "best_of": 2})
    assert response.status_code == 200
