"""A generated client of `baton.v1.Generation` against a real cluster: it means what the HTTP API means."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc, node_pb2
from baton.wire import pack_tokens, unpack_tokens
from tests.e2e.cluster import PATIENCE_S
from tests.e2e.conftest import House
from tools import tiny_tasks

pytestmark = pytest.mark.timeout(300)

RECALL = tiny_tasks.recall(Random(17), "heldout", num_tokens=500)
PLAIN = tiny_tasks.recall(Random(18), "heldout", num_tokens=150, plain=True)
CHAT = pb.Chat(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in RECALL.messages])


@pytest.fixture(scope="module")
def channel(house: House) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(str(house.chunk_2048.grpc)) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> generation_pb2_grpc.GenerationStub:
    return generation_pb2_grpc.GenerationStub(channel)


Said = tuple[pb.GenerationStarted, list[pb.GenerationDelta], pb.GenerationFinished]


def generate(stub: generation_pb2_grpc.GenerationStub, request: pb.GenerateRequest) -> Said:
    responses = list(stub.Generate(request, timeout=PATIENCE_S))
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    assert len({response.request_id for response in responses}) == 1
    return responses[0].started, [response.delta for response in responses[1:-1]], responses[-1].finished


def text_of(deltas: list[pb.GenerationDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def test_a_chat_is_answered_and_accounted_for(stub: generation_pb2_grpc.GenerationStub) -> None:
    started, deltas, finished = generate(stub, pb.GenerateRequest(chat=CHAT, temperature=0, cache_salt="grpc"))
    assert RECALL.check(text_of(deltas))
    assert deltas[-1].finish_reason == node_pb2.FINISH_REASON_STOP
    usage, timings = finished.usage, finished.timings
    assert usage.num_prompt_tokens == started.num_prompt_tokens
    assert usage.num_completion_tokens == sum(len(unpack_tokens(delta.token_ids)) for delta in deltas)
    assert (usage.num_cached_tokens, timings.num_attempts) == (0, 1)
    assert (timings.prefill_node, timings.decode_node) == ("prefill-2048", "decode-large")
    assert timings.transfer_bytes > 0
    assert 0 < timings.first_token_s < timings.total_s
    _, again, second = generate(stub, pb.GenerateRequest(chat=CHAT, temperature=0, cache_salt="grpc"))
    assert text_of(again) == text_of(deltas)
    assert second.usage.num_cached_tokens == (usage.num_prompt_tokens - 1) // 16 * 16
    assert second.timings.num_decode_cached_tokens == usage.num_prompt_tokens // 16 * 16


def test_text_and_token_ids_mean_the_same(stub: generation_pb2_grpc.GenerationStub) -> None:
    prompt = PLAIN.prompt
    tokens = stub.Tokenize(pb.TokenizeRequest(prompt=prompt), timeout=PATIENCE_S).token_ids
    ids = pb.TokenIds(ids=tokens)
    answers = [
        generate(stub, request)[1]
        for request in (
            pb.GenerateRequest(prompt=prompt, temperature=0, max_tokens=20),
            pb.GenerateRequest(prompt_tokens=ids, temperature=0, max_tokens=20),
        )
    ]
    assert text_of(answers[0]).startswith(PLAIN.answer)
    assert text_of(answers[0]) == text_of(answers[1])
    text = stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens), timeout=PATIENCE_S).text
    assert text.endswith(prompt)


def test_samples_stops_and_logprobs(stub: generation_pb2_grpc.GenerationStub) -> None:
    request = pb.GenerateRequest(
        prompt="Once upon a time", n=3, seed=9, temperature=1.0, max_tokens=25, ignore_eos=True, logprobs=2
    )
    _, deltas, finished = generate(stub, request)
    assert finished.usage.num_completion_tokens == 75
    assert len({text_of(deltas, index) for index in range(3)}) > 1
    for delta in deltas:
        assert len(delta.logprobs) == len(unpack_tokens(delta.token_ids))
        assert all(len(entry.top_logprobs) == 2 for entry in delta.logprobs)
    whole = text_of(deltas, 1)
    stop = whole[10:13]
    _, stopped, _ = generate(stub, pb.GenerateRequest(**_fields(request), stop=[stop]))
    ends = {delta.index: delta for delta in stopped if delta.finish_reason}
    assert ends[1].stop_string == stop
    assert text_of(stopped, 1) == whole[: whole.index(stop)]


def _fields(request: pb.GenerateRequest) -> dict[str, Any]:
    return {field.name: value for field, value in request.ListFields()}


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "no input"),
        (pb.GenerateRequest(prompt="x", model="other"), grpc.StatusCode.NOT_FOUND, "does not exist"),
        (
            pb.GenerateRequest(prompt_tokens=pb.TokenIds(ids=pack_tokens([5] * 4096))),
            grpc.StatusCode.INVALID_ARGUMENT,
            "4096 input tokens",
        ),
        (
            pb.GenerateRequest(prompt="x", max_tokens=3000, ignore_eos=True, timeout_s=0.3),
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "not finished within 0.3 s",
        ),
    ],
)
def test_errors_say_what_is_wrong(
    stub: generation_pb2_grpc.GenerationStub, request_: pb.GenerateRequest, status: grpc.StatusCode, says: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(request_, timeout=PATIENCE_S))
    assert error.value.code() is status
    assert says in str(error.value.details())


def test_the_deadline_of_the_call_holds(stub: generation_pb2_grpc.GenerationStub, house: House) -> None:
    request = pb.GenerateRequest(prompt="x", max_tokens=3000, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Generate(request, timeout=0.3))
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    house.wait_whole()


def test_every_process_tells_health_and_services(house: House) -> None:
    wanted = {
        house.chunk_2048.grpc: "baton.v1.Generation",
        house.nodes[0].address: "baton.v1.PrefillNode",
        house.nodes[2].address: "baton.v1.DecodeNode",
    }
    for address, service in wanted.items():
        with grpc.insecure_channel(str(address)) as channel:
            for name in ("", service):
                health = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S
                )
                assert health.status == health_pb2.HealthCheckResponse.SERVING
            assert service in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_models(stub: generation_pb2_grpc.GenerationStub) -> None:
    models = stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S).models
    assert [(model.id, model.max_model_len) for model in models] == [("baton-tiny", 4096)]
