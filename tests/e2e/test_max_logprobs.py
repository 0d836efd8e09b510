"""--max-logprobs: on every way, the logprobs of so many likely tokens are those of transformers' log-softmax, and more
are refused by name and limit. Of several nodes, the smallest limit counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from baton.errors import InvalidRequest
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from baton.wire import pack_tokens, read_logprobs, read_prompt_logprobs, unpack_tokens
from baton_llm import LLM, SamplingParams
from engine.model.load.checkpoint import Checkpoint
from tests.e2e.cluster import PATIENCE_S, Router
from tests.e2e.conftest import House
from tests.e2e.parameters import CHAT, COMPLETIONS, Fields, events

pytestmark = pytest.mark.timeout(300)

PROMPT = list(range(100, 120))
VOCAB_SIZE = 4096
RESPONSES, SGLANG, TOKENS = "/v1/responses", "/generate", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "Tell me a story about a dog."}]
SAMPLING: Fields = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
COMPLETION: Fields = {"prompt": PROMPT, **SAMPLING, "return_token_ids": True, "return_tokens_as_token_ids": True}

Top = dict[int, float]


@dataclass
class Told:
    """`tops`: for each token of the answer, the likely ones with their logprobs. `prompt_tops`: for those of the prompt
    from the second one on."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    tops: Sequence[Top]
    prompt_tops: Sequence[Top] = ()


@pytest.fixture(scope="module")
def model() -> Any:
    path = Checkpoint.find("baton-tiny").path
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def check(told: Told, model: Any, k: int) -> None:
    with torch.inference_mode():
        scores = model(torch.tensor([[*told.prompt, *told.tokens]])).logits[0].log_softmax(-1)
    first = len(told.prompt) - 1
    assert len(told.tops) == len(told.tokens) > 0
    for place, top in enumerate(told.tops):
        check_top(top, scores[first + place], k)
    for place, (own, top) in enumerate(zip(told.prompt[1:], told.prompt_tops, strict=bool(told.prompt_tops))):
        if len(top) > k:  # the prompt's own token is told as well, where it is none of the likely ones
            assert top.pop(own) == pytest.approx(float(scores[place][own]), abs=1e-3)
        check_top(top, scores[place], k)


def check_top(top: Mapping[int, float], expected: Tensor, k: int) -> None:
    """Ids at the end may be others, where two tokens are as likely."""
    assert len(top) == k
    ids, logprobs = list(top), torch.tensor(list(top.values()))
    torch.testing.assert_close(logprobs, expected[ids], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(logprobs.sort(descending=True).values, expected.topk(k).values, atol=1e-3, rtol=1e-4)


def by_id(top: Mapping[str, float]) -> Top:
    return {int(name.removeprefix("token_id:")): logprob for name, logprob in top.items()}


def of_list(entries: Sequence[Mapping[str, Any]]) -> Top:
    return by_id({entry["token"]: entry["logprob"] for entry in entries})


def of_prompt(entries: Sequence[Mapping[str, Any] | None]) -> list[Top]:
    assert entries[0] is None
    return [by_id({name: said["logprob"] for name, said in entry.items()}) for entry in entries[1:] if entry]


def post(router: Router, path: str, body: Fields) -> httpx.Response:
    return httpx.post(f"{router.url}{path}", json=body, trust_env=False, timeout=PATIENCE_S)


def asked(router: Router, path: str, body: Fields) -> Fields:
    response = post(router, path, body)
    assert response.status_code == httpx.codes.OK, response.text
    said: Fields = response.json()
    return said


# ---- each way to ask for k ----


def completion(router: Router, k: int) -> Told:
    said = asked(router, COMPLETIONS, {**COMPLETION, "logprobs": k, "prompt_logprobs": k})["choices"][0]
    tops = [by_id(top) for top in said["logprobs"]["top_logprobs"]]
    return Told(PROMPT, said["token_ids"], tops, of_prompt(said["prompt_logprobs"]))


def chat(router: Router, k: int) -> Told:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body = {"messages": MESSAGES, **SAMPLING, **ids, "logprobs": True, "top_logprobs": k, "prompt_logprobs": k}
    said = asked(router, CHAT, body)
    choice = said["choices"][0]
    tops = [of_list(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]]
    return Told(said["prompt_token_ids"], choice["token_ids"], tops, of_prompt(said["prompt_logprobs"]))


def tokens(router: Router, k: int) -> Told:
    said = asked(
        router, TOKENS, {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "logprobs": k, "prompt_logprobs": k}}
    )
    choice = said["choices"][0]
    tops = [of_list(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]]
    return Told(PROMPT, choice["token_ids"], tops, of_prompt(said["prompt_logprobs"]))


def over_grpc(router: Router, k: int) -> Told:
    told = Told(PROMPT, [], [], [])
    sampling: Fields = {**SAMPLING, "logprobs": k, "prompt_logprobs": k}
    with grpc.insecure_channel(str(router.grpc)) as channel:
        request = pb.GenerateRequest(prompt_tokens=pb.TokenIds(ids=pack_tokens(PROMPT)), **sampling)
        for response in generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=PATIENCE_S):
            if response.WhichOneof("event") == "prompt_logprobs":
                told.prompt_tops = [
                    *told.prompt_tops,
                    *(dict(entry.top) for entry in read_prompt_logprobs(response.prompt_logprobs)),
                ]
            told.tokens = [*told.tokens, *unpack_tokens(response.delta.token_ids)]
            told.tops = [*told.tops, *(dict(entry.top) for entry in read_logprobs(response.delta.logprobs))]
    return told


@pytest.fixture
def remote(request: pytest.FixtureRequest, house: House) -> Iterator[LLM]:
    with LLM(router=str(getattr(house, request.param).grpc)) as llm:
        yield llm


def of_library(llm: LLM, k: int) -> Told:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=k, prompt_logprobs=k)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    answer = output.outputs[0]

    def tops(entries: Any) -> list[Top]:
        return [{token: said.logprob for token, said in entry.items()} for entry in entries if entry]

    return Told(PROMPT, answer.token_ids, tops(answer.logprobs), tops(output.prompt_logprobs))


WAYS = [completion, chat, tokens, over_grpc]


@pytest.mark.parametrize("way", WAYS)
def test_as_many_as_the_flag_says_are_those_of_transformers(way: Any, house: House, model: Any) -> None:
    told = way(house.chunk_64, 50)
    assert len(told.prompt_tops) == len(told.prompt) - 1
    check(told, model, 50)


@pytest.mark.parametrize("way", [completion, over_grpc])
def test_all_of_the_vocabulary(way: Any, house: House, model: Any) -> None:
    check(way(house.chunk_2048, -1), model, VOCAB_SIZE)


@pytest.mark.parametrize("remote", ["chunk_64"], indirect=True)
def test_the_library_gets_as_many_from_a_router(remote: LLM, model: Any) -> None:
    check(of_library(remote, 50), model, 50)
    for k, param in ((51, "prompt_logprobs must be in [0, 50], not 51"), (-1, "not -1")):
        with pytest.raises(InvalidRequest) as refusal:
            of_library(remote, k)
        assert param in refusal.value.message


async def test_streams_and_named_tokens(house: House, model: Any) -> None:
    async with httpx.AsyncClient(base_url=house.chunk_64.url, trust_env=False, timeout=PATIENCE_S) as http:
        chunks = [said async for said in events(http, COMPLETIONS, {**COMPLETION, "logprobs": 50, "stream": True})]
    pieces = [piece for chunk in chunks for piece in chunk["choices"] if piece["token_ids"]]
    tops = [by_id(top) for piece in pieces for top in piece["logprobs"]["top_logprobs"]]
    told = Told(PROMPT, [token for piece in pieces for token in piece["token_ids"]], tops)
    check(told, model, 50)
    named = {"logprobs": 0, "logprob_token_ids": [*told.tops[0]]}
    said = asked(house.chunk_64, COMPLETIONS, {**COMPLETION, "max_tokens": 1, **named})["choices"][0]
    [top] = [by_id(top) for top in said["logprobs"]["top_logprobs"]]
    assert top == pytest.approx(told.tops[0], abs=1e-3)


LIMITS = [("chunk_64", "[0, 50]", 50), ("chunk_2048", "[-1, 4096]", VOCAB_SIZE), ("small", "[0, 20]", 20)]


@pytest.mark.parametrize(("router", "said", "limit"), LIMITS)
def test_more_are_refused_with_the_limit(house: House, router: str, said: str, limit: int) -> None:
    more, served = limit + 1, getattr(house, router)
    ids = {"token_ids_logprob": [5] * more, "top_logprobs_num": 0}
    items = f"List should have at most {limit} items after validation, not {more}"
    cases: list[tuple[str, Fields, str, str]] = [
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": more}, "top_logprobs", said),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": more}, "prompt_logprobs", said),
        (COMPLETIONS, {"prompt": PROMPT, "logprobs": more}, "logprobs", said),
        (COMPLETIONS, {"prompt": PROMPT, "logprobs": 0, "logprob_token_ids": [5] * more}, "logprob_token_ids", items),
        (TOKENS, {"token_ids": PROMPT, "sampling_params": {"logprobs": more}}, "logprobs", said),
        (TOKENS, {"token_ids": PROMPT, "sampling_params": {"prompt_logprobs": -2}}, "prompt_logprobs", said),
        (RESPONSES, {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": more}, "top_", said),
        (SGLANG, {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": more}, "top_", f"[0, {limit}]"),
        (SGLANG, {"input_ids": PROMPT, "return_logprob": True, **ids}, "token_ids_logprob", items),
    ]
    for path, body, param, text in cases:
        response = post(served, path, {**body, "max_tokens": 2} if path == COMPLETIONS else body)
        assert response.status_code == httpx.codes.BAD_REQUEST, (path, body)
        assert param in response.text, response.text
        assert text in response.text, response.text


@pytest.mark.parametrize(("router", "limit"), [("chunk_64", 50), ("small", 20)])
def test_grpc_clients_are_refused_alike(house: House, router: str, limit: int) -> None:
    with grpc.insecure_channel(str(getattr(house, router).grpc)) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        for fields, text in (
            ({"logprobs": limit + 1}, f"logprobs must be at most {limit}, not {limit + 1}"),
            ({"prompt_logprobs": limit + 1}, f"prompt_logprobs must be in [0, {limit}], not"),
            ({"logprob_token_ids": range(limit + 1)}, f"at most {limit}, not {limit + 1}"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Generate(pb.GenerateRequest(prompt="x", max_tokens=1, **fields), timeout=PATIENCE_S))
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in str(error.value.details())
