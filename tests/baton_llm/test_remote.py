"""`LLM` as the client of a router, whose nodes say what a test wants them to."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.errors import NodeUnavailable
from baton.node_info import NodeRole
from baton_llm import LLM, AsyncLLM, InvalidRequest, PromptsFailed, RequestCancelled, SamplingParams
from baton_llm.progress import Progress
from baton_llm.prompts import Prompt
from baton_llm.remote import RemoteBackend
from tests.router.conftest import Router, says
from tests.router.fake_node import Answer, FakeCluster

ANY = {"regex": ".*"}
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=12, logprobs=1, seed=2**64 - 1, n=2, stop="rld", structured_outputs={"regex": ".*"}
)
BOTH: list[Prompt] = ["hi there", [5, 6]]
ONE_WRONG: list[Prompt] = ["hi", [10**6]]
FIRST_ALONE: list[Prompt] = ["hi", [5, 6], [5, 6], [5, 6]]


async def test_answers_come_from_the_router(monkeypatch):
    nodes = FakeCluster(says("hello world"))
    await nodes.add(NodeRole.PREFILL)
    await nodes.add(NodeRole.DECODE)
    router = Router(nodes)
    await router.start()
    await router.ready()
    before = set(threading.enumerate())
    try:
        await asyncio.to_thread(_ask, router.grpc)
        assert sorted(prefill.priority for prefill in nodes.prefills) == [-4, *[0] * 5, 3]
        async with await asyncio.to_thread(AsyncLLM, router=router.grpc) as llm:
            salted: Prompt = {"prompt": "hi there", "cache_salt": "s"}
            outputs = [output async for output in llm.generate(salted, priority=7)]
            assert (nodes.prefills[-1].priority, nodes.prefills[-1].cache_salt) == (7, "s")
            assert outputs[-1].outputs[0].text == "hello world"
            assert await llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9)
            with pytest.raises(NotImplementedError):
                await llm.get_tokenizer()
        held = Answer(hold=asyncio.Event())
        nodes.script = lambda prefill: held if prefill.prompt_tokens == (5, 6) else says("hello world")(prefill)
        await asyncio.to_thread(_close_at_the_first_answer, router.grpc, monkeypatch)
    finally:
        await router.stop()
        await nodes.close()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith("baton") for name in left)


def _ask(address: str) -> None:
    with LLM(router=address) as llm:
        first, second = llm.generate(BOTH, [SamplingParams(), PARAMS], use_tqdm=False)
        assert (first.prompt, first.outputs[0].text) == ("hi there", "hello world")
        assert first.outputs[0].finish_reason == "stop"
        assert first.prompt_token_ids
        assert second.prompt_token_ids == [5, 6]
        assert [answer.text for answer in second.outputs] == ["hello wo"] * 2
        assert [answer.stop_reason for answer in second.outputs] == ["rld"] * 2
        assert len(llm.generate(BOTH, use_tqdm=False, priority=[3, -4])) == 2
        [chat] = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        assert chat.prompt
        assert "hi" in chat.prompt
        assert chat.outputs[0].text == "hello world"
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}]
        [chat] = llm.chat(begun, use_tqdm=False, continue_final_message=True)
        assert chat.prompt
        assert chat.prompt.endswith("assistant\nhe")
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9)
        with pytest.raises(NotImplementedError, match="/tokenize"):
            llm.get_tokenizer()
        with pytest.raises(InvalidRequest, match="trust-request-chat-template") as template:
            llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False, chat_template="x")
        assert template.value.param == "chat_template"
        with pytest.raises(PromptsFailed) as failed:
            llm.generate(ONE_WRONG, use_tqdm=False)
        assert isinstance(refused := failed.value.errors[1], InvalidRequest)
        assert refused.param == "prompt"
        assert failed.value.outputs[0].outputs[0].text == "hello world"
    with pytest.raises(InvalidRequest, match=r"serves .*, not another"):
        LLM("another", router=address)


def _close_at_the_first_answer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other prompts, one is under way and two have not begun."""
    monkeypatch.setattr(RemoteBackend, "max_in_flight", 2)
    llm = LLM(router=address)
    monkeypatch.setattr(Progress, "step", lambda self, result: llm.close())
    with pytest.raises(PromptsFailed) as failed:
        llm.generate(FIRST_ALONE, use_tqdm=False)
    assert failed.value.outputs[0].outputs[0].text == "hello world"
    assert [type(error) for error in failed.value.errors.values()] == [RequestCancelled] * 3


def test_a_router_that_is_not_there(monkeypatch):
    monkeypatch.setattr("baton_llm.remote._CONNECT_S", 0.05)
    with pytest.raises(NodeUnavailable, match="no router answers"):
        LLM(router="127.0.0.1:1")


def test_a_router_takes_no_flags_of_nodes():
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(router="127.0.0.1:1", max_num_seqs=3)
    with pytest.raises(ValueError, match="router: must be HOST:PORT"):
        LLM(router="nowhere")


@pytest.mark.parametrize("api_key", ["ключ", "a\nb", "a b"])
def test_a_key_that_cannot_be_sent_is_named_and_not_shown(api_key):
    with pytest.raises(ValueError, match=r"^api_key: an API key has") as error:
        LLM(router="127.0.0.1:1", api_key=api_key)
    assert api_key not in str(error.value)


@pytest.mark.parametrize(("api_key", "sent"), [("k\n", "Bearer k"), (" k ", "Bearer k"), ("", None), ("\n", None)])
def test_a_key_may_have_the_line_end_of_its_file(api_key, sent):
    metadata = RemoteBackend("127.0.0.1:1", None, api_key, None)._metadata
    assert metadata == ((("authorization", sent),) if sent else ())


def test_authorities_without_a_certificate_are_named(tmp_path):
    path = tmp_path / "ca.pem"
    path.write_text("nothing")
    with pytest.raises(ValueError, match=r"^ssl_ca_certs: .*ca\.pem holds no certificates: "):
        LLM(router="127.0.0.1:1", ssl_ca_certs=path)
