"""`AsyncLLM`: outputs that grow, and requests that end early."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from baton_llm import (
    AsyncLLM,
    BeamSearchParams,
    InvalidRequest,
    RequestCancelled,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from tests.baton_llm.conftest import FLAGS, PATIENCE_S, wait_whole

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**FLAGS)
    yield llm
    llm.close()


async def _last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


async def test_each_output_has_all_that_there_is(async_llm, llm):
    outputs = [output async for output in async_llm.generate("Once upon a time", GREEDY, "r-1")]
    *partial, last = outputs
    assert partial
    assert [output.finished for output in outputs] == [False] * len(partial) + [True]
    for earlier, later in itertools.pairwise(outputs):
        count = len(earlier.outputs[0].token_ids)
        assert later.outputs[0].token_ids[:count] == earlier.outputs[0].token_ids
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    assert {output.request_id for output in outputs} == {"r-1"}
    [whole] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert last.outputs == whole.outputs


async def test_each_output_has_what_is_new_or_the_last_has_all(async_llm, llm):
    params = dataclasses.replace(GREEDY, n=2, logprobs=1, prompt_logprobs=0)
    [whole] = llm.generate("Once upon a time", params, use_tqdm=False)
    delta = dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    outputs = [output async for output in async_llm.generate("Once upon a time", delta)]
    assert len(outputs) > 1
    for index, answer in enumerate(whole.outputs):
        parts = [part for output in outputs for part in output.outputs if part.index == index]
        assert "".join(part.text for part in parts) == answer.text
        assert [token for part in parts for token in part.token_ids] == answer.token_ids
        assert [entry for part in parts for entry in part.logprobs] == answer.logprobs
        assert parts[-1].finish_reason == "length"
    assert [entry for output in outputs for entry in output.prompt_logprobs or []] == whole.prompt_logprobs
    final = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    [last] = [output async for output in async_llm.generate("Once upon a time", final)]
    assert (last.finished, last.outputs) == (True, whole.outputs)


async def test_a_beam_search_has_one_output_with_all_answers(async_llm, llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    [output] = [output async for output in async_llm.beam_search("Once upon a time", params, "beams")]
    [expected] = llm.beam_search("Once upon a time", params)
    assert (output.request_id, output.finished, output.outputs) == ("beams", True, expected.outputs)
    with pytest.raises(InvalidRequest) as refused:
        async_llm.beam_search("x", BeamSearchParams(beam_width=0, max_tokens=6))
    assert refused.value.param == "beam_width"


async def test_several_at_once_and_chat(async_llm):
    sums = [[{"role": "user", "content": f"What is 2{i} + 98?"}] for i in range(4)]
    async with asyncio.timeout(PATIENCE_S):
        outputs = await asyncio.gather(*(_last(async_llm.chat(s, SamplingParams(temperature=0.0))) for s in sums))
    assert [output.outputs[0].text for output in outputs] == [f"2{i} + 98 = {118 + i}" for i in range(4)]


async def test_leaving_early_aborts_and_frees_the_blocks(async_llm, caplog):
    caplog.set_level("INFO", "router.generation")
    async with aclosing(async_llm.generate([5] * 100, ENDLESS)) as stream:
        async for output in stream:
            assert not output.finished
            break
    audits = await asyncio.to_thread(wait_whole, async_llm)
    assert not any(audit.num_slots.get("in_use") for audit in audits)
    assert "error='the client went away'" in caplog.text  # and did not end by itself


async def test_a_cancelled_reader_aborts(async_llm, caplog):
    caplog.set_level("INFO", "router.generation")

    async def read(begun: asyncio.Event) -> None:
        async for _ in async_llm.generate([6] * 100, ENDLESS, "gone"):
            begun.set()

    begun = asyncio.Event()
    reader = asyncio.create_task(read(begun))
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    await asyncio.to_thread(wait_whole, async_llm)
    assert "error='the client went away'" in caplog.text
    outputs = [output async for output in async_llm.generate([6], GREEDY, "gone")]  # the id is free again
    assert outputs[-1].finished


async def test_abort_ends_the_stream_of_that_id(async_llm):
    stream = async_llm.generate([8] * 100, ENDLESS, "a")
    await anext(stream)
    await async_llm.abort("a")
    with pytest.raises(RequestCancelled):
        await _last(stream)
    await async_llm.abort("a")
    await asyncio.to_thread(wait_whole, async_llm)


async def test_errors_come_from_the_first_step(async_llm):
    with pytest.raises(InvalidRequest) as error:
        await anext(async_llm.generate([10**6], GREEDY))
    assert error.value.param == "prompt"
    with pytest.raises(InvalidRequest):
        async_llm.generate(3, GREEDY)
    for request_id in ("\ud800", 3):
        with pytest.raises(InvalidRequest) as error:
            await anext(async_llm.generate("b", GREEDY, request_id))
        assert error.value.param == "request_id"
    with pytest.raises(InvalidRequest):
        async_llm.chat([[{"role": "user", "content": "a"}]] * 2)
    wrong: Any
    for wrong in (3, [GREEDY, GREEDY], [GREEDY, GREEDY]):  # the id stays free
        with pytest.raises(InvalidRequest) as error:
            await anext(async_llm.generate("b", wrong, "wrong"))
        assert error.value.param == "sampling_params"
    async with aclosing(async_llm.generate([8] * 100, ENDLESS, "twice")) as stream:
        await anext(stream)
        with pytest.raises(InvalidRequest) as error:
            await anext(async_llm.generate("b", GREEDY, "twice"))
    assert error.value.param == "request_id"


async def test_close_ends_streams():
    async with AsyncLLM(**FLAGS) as own:
        stream = own.generate([8] * 100, ENDLESS)
        await anext(stream)
    with pytest.raises(RequestCancelled):
        await _last(stream)
