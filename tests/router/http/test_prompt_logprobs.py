"""Logprobs of prompts over HTTP: `prompt_logprobs`, and `echo` with `logprobs` as evaluation harnesses ask for it."""

import json

import openai
import pytest

from baton.errors import NodeUnavailable
from baton.messages import End, HandedOff, SampleEnd, TokenLogprobs, Tokens
from baton.prompt_logprobs import PromptLogprobs
from baton.sampling import FinishReason, SamplingParams
from router.http.logprobs import LEAST, ChatLogprobs, CompletionLogprobs, token_text
from router.requests.actions import Emit
from router.requests.request_state import RoutedRequest
from router.text.answer import Delta
from tests.router.conftest import on_shared_loop
from tests.router.fake_node import prompt_pieces
from tests.router.http_shapes import CHAT, error_of
from tests.router.rig import RouterRig
from tests.router.tiny_tokenizer import tiny_tokenizer

IDS = [[5, 60, 61, 62, 63, 64, 65], [5, 70, 71]]
PROMPT = (1, 2, 3, 4, 5, 6)


def text_of(token):
    return token_text(tiny_tokenizer(), token)


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_what_a_harness_asks_for(client, nodes):
    """The request of lm-eval's `local-completions`, and how it reads the answer."""
    wanted = {"prompt": IDS, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234, "temperature": 0}
    body = (await client.post("/v1/completions", json=wanted)).json()
    for choice, ids in zip(body["choices"], IDS, strict=True):
        shown = choice["logprobs"]
        num_context = 2
        assert shown["token_logprobs"][num_context:-1] == [-float(i) for i in range(num_context, len(ids))]
        assert shown["token_logprobs"][0] is None
        assert shown["top_logprobs"][0] is None
        assert shown["tokens"][: len(ids)] == [text_of(token) for token in ids]
        greedy = [
            max(top.values()) == own
            for top, own in zip(shown["top_logprobs"], shown["token_logprobs"], strict=True)
            if top
        ]
        assert greedy == [False] * (len(ids) - 1) + [True]
        texts = [text_of(token) for token in ids]
        assert shown["text_offset"] == [len("".join(texts[:i])) for i in range(len(ids) + 1)]
        assert "prompt_logprobs" not in choice
    assert [prefill.sampling.num_prompt_logprobs for prefill in nodes.prefills] == [1, 1]
    assert body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone(client, stream):
    wanted = {"prompt": IDS[0], "max_tokens": 0, "logprobs": 2, "echo": True, "stream": stream}
    response = await client.post("/v1/completions", json=wanted)
    [choice] = (
        [c for e in events(response.text) for c in e["choices"] if c["logprobs"]["tokens"]]
        if stream
        else response.json()["choices"]
    )
    last = events(response.text)[-1]["choices"][0] if stream else choice
    assert choice["text"] == tiny_tokenizer().decode(IDS[0])
    assert last["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, *(-float(i) for i in range(1, len(IDS[0])))]
    assert choice["logprobs"]["top_logprobs"][1] == {text_of(7): -0.25, text_of(8): -0.5, text_of(60): -1.0}
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0


async def test_vllms_form_is_in_every_choice(client, nodes):
    wanted = {**CHAT, "prompt_logprobs": 1, "n": 2}
    whole = (await client.post("/v1/chat/completions", json=wanted)).json()
    tokens = nodes.prefills[0].prompt_tokens
    assert whole["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]
    for choice in whole["choices"]:
        told = choice["prompt_logprobs"]
        assert told[0] is None
        assert [next(iter(entry)) for entry in told[1:]] == [str(token) for token in tokens[1:]]
        assert told[3][str(tokens[3])] == {"logprob": -3.0, "rank": 3, "decoded_token": text_of(tokens[3])}
        assert told[3]["7"] == {"logprob": -0.25, "rank": 1, "decoded_token": text_of(7)}
    chunks = events((await client.post("/v1/chat/completions", json={**wanted, "stream": True})).text)
    streamed = [(c["index"], c["prompt_logprobs"]) for e in chunks for c in e["choices"] if "prompt_logprobs" in c]
    assert sorted(streamed) == [(choice["index"], choice["prompt_logprobs"]) for choice in whole["choices"]]
    first = next(e["choices"][0] for e in chunks)
    assert "prompt_logprobs" in first


async def test_the_official_client_reads_echoed_logprobs(router):
    async with openai.AsyncOpenAI(base_url=f"{router.http}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="", prompt=IDS, max_tokens=0, logprobs=1, echo=True)
    assert [choice.logprobs.token_logprobs[1:] for choice in answer.choices] == [
        [-float(i) for i in range(1, len(ids))] for ids in IDS
    ]


@on_shared_loop
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs", "[0, 20], not -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "[0, 20], not 21"),
        ({"max_tokens": 0}, "max_tokens", "0 with `echo`"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "not 1"),
        ({"prompt": [IDS[0]] * 20, "n": 128, "prompt_logprobs": 20, "stream": True}, "prompt", ""),
        ({"prompt": [5] * 50, "n": 40, "prompt_logprobs": 20, "stream": True}, "prompt_logprobs", "at most 32768"),
    ],
)
async def test_bad_requests(shared_client, fields, param, says):
    response = await shared_client.post("/v1/completions", json={"prompt": IDS[0], **fields})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]


# ---- the router's rules ----


def submitted(n: int = 1, num_top: int = 0):
    rig = RouterRig("p1", "p2", "d1", "d2")
    sampling = SamplingParams(max_tokens=8, num_prompt_logprobs=num_top)
    rig.core.submit(RoutedRequest("r", PROMPT, n, sampling, 60.0), 0.0)
    rig.collect()
    return rig, rig.prefills[-1]


def scores(rig):
    told = [emit.event for emit in rig.emitted if isinstance(emit, Emit)]
    return [entry.logprob for event in told if isinstance(event, PromptLogprobs) for entry in event]


def test_a_lost_node_leaves_each_token_with_one_logprob() -> None:
    rig, (name, first) = submitted()
    pieces = prompt_pieces(first, 2)
    rig.say(name, first, pieces[0])
    rig.core.node_lost(name, "gone", 1.0)
    rig.collect()
    name, second = rig.prefills[-1]
    assert second.sampling.num_prompt_logprobs == 0
    rig.say(name, second, *prompt_pieces(second, 3), Tokens(0, 0, (5,)))
    assert scores(rig) == [-1.0, -2.0, -3.0, -4.0, -5.0]
    rig.say(name, second, End(NodeUnavailable("stopping")))
    assert rig.prefills[-1][1].sampling.num_prompt_logprobs is None  # all are told: not computed again


@pytest.mark.parametrize(
    "lie",
    [
        Tokens(0, 0, (5,)),
        SampleEnd(0, FinishReason.STOP),
        PromptLogprobs(3, 0, bytes(4), bytes(4)),  # leaves tokens out
        PromptLogprobs(1, 1, bytes(4), bytes(4), bytes(4), bytes(4)),  # more than asked for
        PromptLogprobs(2, 0, bytes(40), bytes(40)),  # past the prompt
    ],
)
def test_what_cannot_be_is_the_attempts_end(lie: object) -> None:
    rig, (name, first) = submitted()
    rig.say(name, first, prompt_pieces(first, 1)[0], lie)
    assert rig.prefills[-1][1].attempt_id.attempt == 1
    assert scores(rig) == [-1.0]


@pytest.mark.parametrize("of_prefill", [(5,), ()], ids=["token 0 is P's", "P samples none"])
def test_what_decode_says_waits_for_the_prompts_logprobs(of_prefill: tuple[int, ...]) -> None:
    rig, (name, first) = submitted()
    assert first.decode
    rig.say(first.decode.incarnation, first, Tokens(0, len(of_prefill), (6,)))
    assert not rig.emitted
    rig.say(name, first, *prompt_pieces(first), *[Tokens(0, 0, of_prefill)] * len(of_prefill), HandedOff(0.1))
    assert scores(rig) == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert rig.told == [(0, token) for token in (*of_prefill, 6)]


def test_nobody_may_tell_what_was_not_asked_for() -> None:
    rig = RouterRig("p1", "d1")
    first = rig.submit()
    rig.say("p1", first, PromptLogprobs(1, 0, bytes(4), bytes(4)))
    assert rig.prefills[-1][1].attempt_id.attempt == 1


def test_logprobs_that_are_no_numbers_do_not_break_the_json():
    """A model that overflows in 16 bits has logits that are NaN."""
    entry = TokenLogprobs(float("nan"), ((5, float("nan")), (7, float("-inf"))))
    delta = Delta(0, "!", (5,), (entry,))
    for shape in (ChatLogprobs(tiny_tokenizer()), CompletionLogprobs(tiny_tokenizer())):
        assert json.dumps(shape.of(delta), allow_nan=False).count(str(LEAST)) == 3
