"""gRPC requests as bytes: what has too much in it is refused before it is parsed."""

from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.grpc.requests import parse_request

CHAT = pb.GenerateRequest(
    chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]),
    temperature=0.5,
    logit_bias={5: 1.0, 2**31 - 1: -1.0},
    stop=["a", "b"],
    stop_token_ids=[1, 2, 2**31 - 1],
    seed=-1,
)


@pytest.mark.parametrize(
    "request_", [CHAT, pb.GenerateRequest(), pb.TokenizeRequest(prompt="x"), pb.DetokenizeRequest(token_ids=b"1234")]
)
def test_what_is_sent_is_read(request_):
    assert parse_request(type(request_), request_.SerializeToString()) == request_


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x2a\xa0\x9c\x01" + b"\x0a\x00" * 10_000, None),
        (b"\x2a\xa2\x9c\x01" + b"\x0a\x00" * 10_001, "at most 10000 messages"),
        (b"\x2a\x02\x0a\x00" * 10_000, "fields"),
        (b"\x9a\x01\x00" * 4_000, "fields"),
        (b"\x72\x00" * 4_000, "fields"),
        (b"\xa0\x01\x05" * 4_000, "fields"),
        (pb.GenerateRequest(stop_token_ids=[5] * 20_000).SerializeToString(), "at most 1024 ids"),
        (pb.GenerateRequest(allowed_token_ids=[5] * 200_000).SerializeToString(), "at most 16384 ids"),
        (pb.GenerateRequest(bad_words=["x"] * 4_000).SerializeToString(), "fields"),
        (b"\x1a\x05abc", "cut off"),
        (b"\x1a", "not a baton.v1.GenerateRequest"),
        (b"\x1a\x02\xff\xfe", "not a baton.v1.GenerateRequest"),
        (b"\x1b", "group"),
        (b"\xff" * 12, "10 bytes"),
    ],
)
def test_what_is_too_much_or_no_message_is_refused(data, says):
    if says is None:
        assert len(parse_request(pb.GenerateRequest, data).chat.messages) == 10_000
        return
    with pytest.raises(InvalidRequest, match=says):
        parse_request(pb.GenerateRequest, data)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=40), st.integers(0, 100))
def test_any_bytes_are_read_or_refused(noise, at):
    data = CHAT.SerializeToString()
    for candidate in (noise, data[:at] + noise + data[at:], data[:at]):
        try:
            read = parse_request(pb.GenerateRequest, candidate)
        except InvalidRequest:
            continue
        assert read == pb.GenerateRequest.FromString(candidate)


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
async def test_garbage_is_an_invalid_argument(router, method):
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        call: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
        answer = call(f"/baton.v1.Generation/{method}")(b"\x1a\x05abc")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await (answer.read() if method == "Generate" else answer)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (pb.GenerateRequest(prompt="x", model="m" * 200_000), grpc.StatusCode.NOT_FOUND),
        (pb.GenerateRequest(prompt="x", model="%" * 5_000), grpc.StatusCode.NOT_FOUND),
        (pb.TokenizeRequest(prompt="x", model="m" * 8_000), grpc.StatusCode.NOT_FOUND),
        (
            pb.GenerateRequest(prompt="x", structured_outputs={"kind": "regex", "text": "(" + "你" * 3_000}),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_a_long_message_does_not_hide_the_status(router, request_, status):
    """More metadata than a client takes ends the call with RESOURCE_EXHAUSTED there, as if it should come again."""
    await router.ready()
    async with grpc.aio.insecure_channel(router.grpc) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)
        is_stream = isinstance(request_, pb.GenerateRequest)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await (stub.Generate(request_).read() if is_stream else stub.Tokenize(request_))
    assert error.value.code() is status
    assert 400 < len(error.value.details() or "") <= 4096
