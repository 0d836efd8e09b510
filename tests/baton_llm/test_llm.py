"""`LLM` with a prefill engine and a decode engine in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import re
import signal
import threading

import numpy
import pytest

from baton.errors import CacheExhausted, InternalError
from baton_llm import LLM, InvalidRequest, PromptsFailed, RequestCancelled, SamplingParams
from baton_llm.local.settings import make_settings
from node.kv_events_config import KvEventsConfig
from tests.baton_llm.conftest import FLAGS, audit, backend_of, wait_whole
from tests.e2e import reference_file

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SUM = [{"role": "user", "content": "What is 28 + 98?"}]
ANSWER = "28 + 98 = 126"
VOCAB_SIZE = 4096


def test_outputs_come_in_the_order_of_the_prompts(llm):
    long, short = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), GREEDY
    prompts = ["Once upon a time", "There was a fox", "In the morning"]
    outputs = llm.generate(prompts, [long, short, short], use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert len(outputs[0].outputs[0].token_ids) == 40
    assert all(output.finished and output.outputs[0].finish_reason for output in outputs)
    assert len({output.request_id for output in outputs}) == 3


def test_tokens_are_those_of_transformers(llm):
    file = reference_file.load()
    assert backend_of(llm).prefill.info.layout.fingerprint == file.fingerprint
    references = [r for r in file.of_kind("ids", "text", "shared") if len(r.prompt) < 1500][::6]
    params = [SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=r.ignore_eos) for r in references]
    outputs = llm.generate([list(r.prompt) for r in references], params, use_tqdm=False)
    for reference, output in zip(references, outputs, strict=True):
        difference = reference.difference(output.outputs[0].token_ids)
        assert difference is None or difference.is_near_tie, str(difference)
        assert difference or output.outputs[0].finish_reason == reference.finish
    assert len(references) > 10


def test_prompts_travel_from_the_prefill_engine_to_the_decode_engine(llm, caplog):
    with caplog.at_level("INFO", "router.generation"):
        llm.generate([[7] * 64], GREEDY, use_tqdm=False)
    (line,) = [line for line in caplog.messages if line.startswith("ended ")]
    assert " attempts=1 " in line
    assert " prefill_node=prefill-" in line
    assert " decode_node=decode-" in line


def test_a_text_its_ids_and_a_dict_are_the_same_prompt(llm):
    [text] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    ids = text.prompt_token_ids
    forms = [[ids], {"prompt_token_ids": ids}, {"prompt": "Once upon a time"}, ids, [{"prompt_token_ids": ids}]]
    for form in forms:
        [output] = llm.generate(form, GREEDY, use_tqdm=False)
        assert (output.prompt_token_ids, output.outputs) == (ids, text.outputs)
    assert [llm.generate(form, GREEDY, use_tqdm=False)[0].prompt for form in forms[:3]] == [None, None, text.prompt]


def test_chat_uses_the_template(llm):
    [output] = llm.chat(SUM, GREEDY, use_tqdm=False)
    assert output.outputs[0].text == ANSWER
    assert output.prompt.startswith("<|bos|><|im_start|>user\nWhat is 28 + 98?")
    several = llm.chat([SUM, SUM], GREEDY, use_tqdm=False)
    assert [one.outputs for one in several] == [output.outputs] * 2


ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


def test_a_chat_has_tools_and_calls_of_them(llm):
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 28, "b": 98}'}}]
    messages = [
        *SUM,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "126"},
    ]
    [output] = llm.chat(messages, sampling_params=GREEDY, use_tqdm=False, tools=[ADD])
    before, after = output.prompt.split("What is 28 + 98?")
    assert "add() adds" in before
    assert '{"name": "add", "arguments": {"a": 28, "b": 98}}' in after
    assert "126" in after


def test_a_chat_says_how_it_becomes_a_prompt(llm):
    begun = [*SUM, {"role": "assistant", "content": "28 + 98 ="}]
    [output] = llm.chat(begun, GREEDY, use_tqdm=False, continue_final_message=True)
    assert output.prompt.endswith("28 + 98 =")
    assert output.outputs[0].text == ANSWER.removeprefix("28 + 98 =")
    [output] = llm.chat(SUM, GREEDY, use_tqdm=False, add_generation_prompt=False, chat_template=None)
    assert output.prompt.endswith("<|im_end|>\n")
    template = "{{ messages[0].content }} {{ how }}"
    [output] = llm.chat(SUM, GREEDY, use_tqdm=False, chat_template=template, chat_template_kwargs={"how": "now"})
    assert output.prompt == "What is 28 + 98? now"
    with pytest.raises(InvalidRequest, match="exclude each other"):
        llm.chat(begun, GREEDY, use_tqdm=False, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(TypeError, match="'tool'"):
        llm.chat(SUM, GREEDY, tool=[ADD])


def test_without_params_the_model_decides(llm):
    [output] = llm.chat(SUM, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (ANSWER, "stop")


def test_samples_differ_and_a_seed_repeats_them(llm):
    params = SamplingParams(n=3, seed=5, temperature=1.5, max_tokens=8, ignore_eos=True)
    first, again = (llm.generate("In the", params, use_tqdm=False)[0] for _ in range(2))
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) == 3
    assert [a.token_ids for a in first.outputs] == [a.token_ids for a in again.outputs]
    other = SamplingParams(n=3, seed=6, temperature=1.5, max_tokens=8, ignore_eos=True)
    [third] = llm.generate("In the", other, use_tqdm=False)
    assert [a.token_ids for a in first.outputs] != [a.token_ids for a in third.outputs]


def test_a_stop_text_ends_the_answer(llm):
    stopped = SamplingParams(temperature=0.0, max_tokens=12, stop="= ")
    kept = SamplingParams(temperature=0.0, max_tokens=12, stop=["= "], include_stop_str_in_output=True)
    outputs = llm.chat([SUM, SUM], [stopped, kept], use_tqdm=False)
    assert [(o.outputs[0].text, o.outputs[0].stop_reason) for o in outputs] == [
        ("28 + 98 ", "= "),
        ("28 + 98 = ", "= "),
    ]


def test_a_stop_token_is_named(llm):
    [plain] = llm.chat(SUM, GREEDY, use_tqdm=False)
    token = plain.outputs[0].token_ids[2]
    [output] = llm.chat(SUM, SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[token]), use_tqdm=False)
    assert (output.outputs[0].stop_reason, output.outputs[0].finish_reason) == (token, "stop")
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids[:3]


def test_without_detokenize_there_are_token_ids_alone(llm):
    params = [GREEDY, dataclasses.replace(GREEDY, detokenize=False)]
    plain, bare = (output.outputs[0] for output in llm.chat([SUM, SUM], params, use_tqdm=False))
    assert bare == dataclasses.replace(plain, text="")


def test_an_answer_matches_what_it_must(llm):
    params = SamplingParams(structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}, seed=3, n=2, max_tokens=20)
    [output] = llm.generate("Once", params, use_tqdm=False)
    assert all(re.fullmatch("[0-9]{3}-[a-f]{2}", answer.text) for answer in output.outputs)
    with pytest.raises(InvalidRequest, match="regex"):
        llm.generate("Once", SamplingParams(structured_outputs={"regex": "(a"}), use_tqdm=False)


def test_logprobs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    answer = output.outputs[0]
    assert [next(iter(entry)) for entry in answer.logprobs] == answer.token_ids
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert [logprob.rank for logprob in entry.values()] == [1, 2, 3]
        assert 0.0 < sum(math.exp(logprob.logprob) for logprob in entry.values()) <= 1.0 + 1e-5
        assert entry[token].decoded_token in answer.text
    chosen = sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(chosen)
    [plain] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None, None)


def test_logprobs_of_the_whole_vocabulary(llm):
    every = SamplingParams(temperature=0.0, max_tokens=2, logprobs=-1, prompt_logprobs=50)
    [output] = llm.generate([[*range(100, 140)]], every, use_tqdm=False)
    for entry in output.outputs[0].logprobs:
        assert entry.keys() == set(range(VOCAB_SIZE))
        assert sum(math.exp(said.logprob) for said in entry.values()) == pytest.approx(1.0, abs=1e-4)
        assert [said.rank for said in entry.values()] == [*range(1, VOCAB_SIZE + 1)]
    assert {len(entry) for entry in output.prompt_logprobs[1:]} <= {50, 51}
    many = SamplingParams(n=128, max_tokens=1, prompt_logprobs=50)  # more in all than a router would tell one client
    [output] = llm.generate([[*range(100, 300)]], many, use_tqdm=False)
    assert len(output.prompt_logprobs) == 200
    for params, says in (
        (SamplingParams(logprobs=VOCAB_SIZE + 1), "logprobs must be at most 4096, not 4097"),
        (SamplingParams(prompt_logprobs=VOCAB_SIZE + 1), r"prompt_logprobs must be in \[-1, 4096\], not 4097"),
        (SamplingParams(logprob_token_ids=[VOCAB_SIZE]), "Token id 4096 is out of vocabulary"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            llm.generate("x", params, use_tqdm=False)


def test_logprobs_of_named_tokens(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6)
    [most_likely, named] = llm.generate(
        ["Once upon a time"] * 2,
        [dataclasses.replace(params, logprobs=20), dataclasses.replace(params, logprob_token_ids=[300, 16, 300])],
        use_tqdm=False,
    )
    answer, known = named.outputs[0], most_likely.outputs[0].logprobs
    assert answer.token_ids == most_likely.outputs[0].token_ids
    for token, entry, top in zip(answer.token_ids, answer.logprobs, known, strict=True):
        assert list(entry) == [token, *(one for one in (300, 16) if one != token)]
        assert {logprob.rank for logprob in entry.values()} == {None}
        shared = entry.keys() & top.keys()
        assert [entry[one].logprob for one in shared] == pytest.approx([top[one].logprob for one in shared], abs=1e-4)
        assert all(entry[one].logprob <= min(x.logprob for x in top.values()) for one in entry.keys() - top.keys())


def test_logprobs_of_a_prompt_are_those_of_the_same_tokens_as_an_answer(llm):
    """The prefill node scores what the decode node chose one by one; with a handoff and without one."""
    prompt = list(range(100, 140))
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
    [answer] = [output.outputs[0] for output in llm.generate([prompt], params, use_tqdm=False)]
    whole = prompt + answer.token_ids
    for max_tokens in (1, 3):
        again = SamplingParams(n=2, temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2)
        [output] = llm.generate([whole], again, use_tqdm=False)
        scores = output.prompt_logprobs
        assert (len(scores), scores[0], output.num_cached_tokens) == (len(whole), None, 0)
        for token, entry, chosen in zip(answer.token_ids, scores[len(prompt) :], answer.logprobs, strict=True):
            assert [(t, e.rank) for t, e in entry.items()] == [(t, e.rank) for t, e in chosen.items()]
            assert entry[token].logprob == pytest.approx(chosen[token].logprob, abs=1e-3)
    [one] = llm.generate([[100]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert one.prompt_logprobs == [None]


def test_a_prompt_that_was_computed_is_not_computed_again(llm):
    prompt = list(range(900, 980))
    first, again = (llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
    assert first.outputs == again.outputs


def test_the_bar_counts_prompts(llm, capsys):
    llm.generate([[5, 6]] * 3, GREEDY)
    assert "3/3" in capsys.readouterr().err
    llm.generate([[5, 6]] * 3, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


# ---- errors ----


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    [
        (["fine", []], GREEDY, "prompt"),
        (["fine", [10**6]], GREEDY, "prompt"),
        (["fine", [1] * 10**5], GREEDY, "prompt"),
        (["fine", "fine"], [GREEDY, SamplingParams(max_tokens=10**6)], "max_tokens"),
        (["fine", "fine"], [GREEDY, SamplingParams(logit_bias={10**6: 1.0})], "logit_bias"),
        (["fine", 3], GREEDY, "prompts"),
        ({"prompt": [1]}, GREEDY, "prompts"),
        ({"prompt": "a", "multi_modal_data": {}}, GREEDY, "prompts"),
        (7, GREEDY, "prompts"),
        (numpy.array([5, 6]), GREEDY, "prompts"),
        (["fine", "not \ud800"], GREEDY, "prompts"),
        ({"prompt": "a", "cache_salt": "\ud800"}, GREEDY, "cache_salt"),
        ({"prompt": "a", "cache_salt": 0}, GREEDY, "cache_salt"),
        (["fine", "fine"], [GREEDY], "sampling_params"),
        (["fine"], "greedy", "sampling_params"),
    ],
)
def test_what_is_invalid_is_refused_before_anything_runs(llm, prompts, params, param):
    with pytest.raises(InvalidRequest) as error:
        llm.generate(prompts, params, use_tqdm=False)
    assert error.value.param == param


@pytest.mark.parametrize("messages", ["hi", [], [{"content": "hi"}], [{"role": "user", "content": 3}], [["hi"]], 7])
def test_invalid_messages_are_refused(llm, messages):
    with pytest.raises(InvalidRequest) as error:
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert error.value.param == "messages"


def test_a_failing_prompt_leaves_the_others_their_outputs(llm):
    """n samples of a long prompt need more blocks than the pool has."""
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    many = SamplingParams(n=64, max_tokens=400, ignore_eos=True)
    with pytest.raises(PromptsFailed) as error:
        llm.generate(["Once", [9] * 40, "There"], [greedy, many, greedy], use_tqdm=False)
    assert list(error.value.errors) == [1]
    assert isinstance(error.value.errors[1], CacheExhausted | InvalidRequest)
    first, none, last = error.value.outputs
    assert none is None
    assert [first.prompt, last.prompt] == ["Once", "There"]
    assert len(last.outputs[0].token_ids) == 4
    from_a_worker = pickle.loads(pickle.dumps(error.value))
    assert (str(from_a_worker), from_a_worker.outputs) == (str(error.value), error.value.outputs)
    assert repr(from_a_worker.errors) == repr(error.value.errors)
    wait_whole(llm)


@pytest.mark.parametrize(
    ("name", "value"), [("enable_expert_parallel", "true"), ("enable_eplb", "true"), ("eplb_config", "{}")]
)
def test_an_environment_that_is_meant_for_nodes_of_several_ranks_does_not_matter(monkeypatch, name, value):
    monkeypatch.setenv(f"BATON_{name.upper()}", value)
    for settings in make_settings({"model": "baton-tiny"}):
        assert not getattr(settings, name)


def test_each_node_publishes_kv_events_at_an_address_of_its_own(monkeypatch):
    stated = {"enable_kv_cache_events": True, "endpoint": "tcp://*:7101", "replay_endpoint": "tcp://*:7201"}
    monkeypatch.setenv("BATON_KV_EVENTS_CONFIG", json.dumps(stated))  # meant for nodes that are processes
    assert [settings.kv_events_config for settings in make_settings({"model": "baton-tiny"})] == [None, None]
    both = make_settings({"model": "baton-tiny", "kv_events_config": json.dumps(stated)})
    configs = [KvEventsConfig.parse(settings.kv_events_config or "") for settings in both]
    assert [config.endpoint for config in configs] == ["tcp://*:7101", "tcp://*:7102"]
    assert [config.replay_endpoint for config in configs] == ["tcp://*:7201", "tcp://*:7202"]


def test_flags_are_checked(monkeypatch):
    monkeypatch.setenv("BATON_TENSOR_PARALLEL_SIZE", "4")  # meant for nodes that are processes
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        LLM(max_model_length=100)
    with pytest.raises(TypeError, match="'listen' is no flag"):
        LLM(listen="0.0.0.0:80")
    with pytest.raises(ValueError, match=r"--max-num-seqs: .* not 0"):
        LLM(max_num_seqs=0)
    with pytest.raises(ValueError, match=r"--tensor-parallel-size: .* LLM\(router=...\)"):
        LLM(tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"--pipeline-parallel-size: .* LLM\(router=...\)"):
        LLM(pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="--data-parallel-size: ranks are processes"):
        LLM(data_parallel_size=2, data_parallel_rank=0, enable_expert_parallel=True)
    with pytest.raises(ValueError, match="--model /nowhere"):
        LLM("/nowhere", tensor_parallel_size=1)
    with pytest.raises(TypeError, match="for a router"):
        LLM(api_key="k")


def test_prompts_of_different_salts_share_no_kv(llm):
    prompt = list(range(300, 380))
    salts = ["a", "b", "a", None]
    prompts = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for salt in salts]
    cached = [llm.generate(one, GREEDY, use_tqdm=False)[0].num_cached_tokens for one in prompts]
    assert cached == [0, 0, 64, 0]
    for wrong in (7, "x" * 257):
        with pytest.raises(InvalidRequest, match="cache_salt") as refused:
            llm.generate({"prompt": "Once", "cache_salt": wrong}, use_tqdm=False)
        assert refused.value.param == "cache_salt"
    with pytest.raises(InvalidRequest, match="must have `prompt` or"):
        llm.generate({"cache_salt": "a"}, use_tqdm=False)


# ---- what the model brings ----


def test_its_tokenizer_makes_the_prompts_that_are_answered(llm):
    tokenizer = llm.get_tokenizer()
    [text] = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert tokenizer.encode("Once upon a time") == text.prompt_token_ids
    answer = text.outputs[0]
    assert tokenizer.decode(answer.token_ids, skip_special_tokens=True) == answer.text
    [chat] = llm.chat(SUM, GREEDY, use_tqdm=False)
    assert tokenizer.apply_chat_template(SUM, tokenize=False, add_generation_prompt=True) == chat.prompt
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == tokenizer.eos_token == "<|im_end|>"
    assert llm.get_tokenizer() is tokenizer


def test_its_sampling_params_are_those_of_its_generation_config(llm):
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.7, top_p=0.95)
    assert params.max_tokens == 16
    [output] = llm.generate("Once", params, use_tqdm=False)
    assert output.outputs[0].token_ids


# ---- the end ----


def test_close_ends_all_threads_and_all_requests():
    before = set(threading.enumerate())
    with LLM(**FLAGS) as own:
        failed: list[BaseException] = []

        def generate() -> None:
            try:
                own.generate("Once", SamplingParams(max_tokens=2000, ignore_eos=True), use_tqdm=False)
            except Exception as error:  # noqa: BLE001
                failed.append(error)

        caller = threading.Thread(target=generate)
        caller.start()
        while not backend_of(own)._dispatcher._core.num_requests_by_state()["decoding"] and caller.is_alive():
            audit(own)  # waits for a turn
    caller.join(60)
    assert [type(error) for error in failed] == [RequestCancelled]
    assert set(threading.enumerate()) <= before
    own.close()
    with pytest.raises(RuntimeError, match="closed"):
        own.generate("Once")


def test_an_llm_without_users_ends_by_itself():
    before = set(threading.enumerate())
    own = LLM(**FLAGS)
    own.generate("Once", GREEDY, use_tqdm=False)
    new = set(threading.enumerate()) - before
    assert {thread.name for thread in new} >= {"baton-llm", "engine"}
    del own
    for thread in new:
        thread.join(60)
    assert not [thread for thread in new if thread.is_alive()]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_cannot_use_it_and_ends_at_once(llm):
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that hangs
        told = ""
        with contextlib.suppress(BaseException):
            try:
                llm.generate("Once", GREEDY, use_tqdm=False)
            except RuntimeError as error:
                told = str(error)
        llm.close()
        os._exit(0 if "a fork" in told else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate("Once", GREEDY, use_tqdm=False)


def test_a_failed_engine_ends_all_requests_by_name():
    with LLM(**FLAGS) as own:
        backend, failed = backend_of(own), []

        def generate() -> None:
            try:
                own.generate("Once", SamplingParams(max_tokens=1900, ignore_eos=True), use_tqdm=False)
            except InternalError as error:
                failed.append(error.message)

        caller = threading.Thread(target=generate)
        caller.start()
        while not backend._dispatcher._core.num_requests_by_state()["decoding"] and caller.is_alive():
            audit(own)  # waits for a turn
        backend.decode.role.prepare = lambda now: 1 // 0  # type: ignore[assignment]
        caller.join(60)
        with pytest.raises(InternalError, match="the engine failed: integer division or modulo by zero"):
            own.generate("Once", GREEDY, use_tqdm=False)
    assert failed == ["the engine failed: integer division or modulo by zero"]
