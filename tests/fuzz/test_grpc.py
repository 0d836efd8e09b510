"""Messages to the public gRPC API that no client would send, and messages that are none."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.message import Message

from baton.rpc.channels import CHANNEL_OPTIONS
from baton.v1 import common_pb2
from baton.v1 import generation_pb2 as pb
from tests.fuzz.mutations import wrong_wire
from tests.fuzz.served import CASE_S, SHARES, answers_as_ever, no_mistakes, serving, some_at_once

NUM_MESSAGES = 350
OURS = frozenset((grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE))
"""What no client's message may be answered with."""

CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi", name="me")])
GENERATE = pb.GenerateRequest(
    request_id="r", model="tiny", prompt="hi there", n=2, temperature=0.5, top_k=5, logit_bias={7: 1.0}, max_tokens=8
)
METHODS: dict[str, tuple[Message, ...]] = {
    "Generate": (
        GENERATE,
        pb.GenerateRequest(
            prompt_tokens=pb.TokenIds(ids=b"\7\0\0\0" * 4),
            stop=["x"],
            stop_token_ids=[3],
            logprobs=1,
            allowed_token_ids=[7],
        ),
        pb.GenerateRequest(
            chat=CHAT,
            timeout_s=5.0,
            min_tokens=1,
            max_tokens=3,
            cache_salt="a",
            seed=1,
            bad_words=["x"],
            priority=-1,
            logits_processors=[common_pb2.LogitsProcessor(name="x", arguments="{}")],
        ),
    ),
    "Tokenize": (pb.TokenizeRequest(prompt="hi there"), pb.TokenizeRequest(chat=CHAT, add_special_tokens=True)),
    "Detokenize": (pb.DetokenizeRequest(model="tiny", token_ids=b"\7\0\0\0" * 4),),
    "ListModels": (pb.ListModelsRequest(),),
}


@SHARES
@pytest.mark.parametrize("method", METHODS)
async def test_messages(share: int, method: str, caplog: pytest.LogCaptureFixture) -> None:
    codes, wrong = Counter[str](), dict[str, str]()
    async with serving() as router, grpc.aio.insecure_channel(router.grpc, options=CHANNEL_OPTIONS) as channel:
        # bytes as they are; one answer is a stream too
        call: Any = channel.unary_stream(f"/baton.v1.Generation/{method}")  # type: ignore[call-arg]

        async def one(number: int) -> None:
            random = Random(f"{method} {number}")
            sent = wrong_wire(random, random.choice(METHODS[method]))
            code, details = grpc.StatusCode.OK, ""
            try:
                async for _ in call(sent, timeout=CASE_S):
                    pass
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), str(error.details())
            codes[code.name] += 1
            if code in OURS:
                wrong.setdefault(f"{code.name} {details[:60]}", f"case {number}: {details} {sent[:200]!r}")

        await some_at_once(one, NUM_MESSAGES // share)
        async with httpx.AsyncClient(base_url=router.http, timeout=CASE_S) as client:
            await answers_as_ever(client)
        await router.idle()
    assert not wrong, "\n".join(wrong.values())
    assert codes["OK"] > 20, codes
    assert method == "ListModels" or codes["INVALID_ARGUMENT"] > 20, codes
    no_mistakes(caplog)
