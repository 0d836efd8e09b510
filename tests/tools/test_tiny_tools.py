"""The tasks with tools and schemas: calls are compared as JSON, and the template writes what the training writes."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from router.text.chat import ChatTemplate
from router.tool_parsers import TOOL_PARSERS, CallArguments, CallStart, Content
from tools import tiny_tasks
from tools.tiny.tasks.sample import Sample, calls_in
from tools.tiny.training.slabs import draw_chat
from tools.tiny.training.tokenizer import CHAT_TEMPLATE

FOLDER = Path(__file__).parents[2] / "engine" / "checkpoints" / "baton-tiny"
MAKERS = ("tool_call", "tool_calls", "tool_extract", "tool_result", "tool_chain", "no_tool", "fill_schema")
OLD_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEMPLATE, BEFORE = (ChatTemplate(source, {"bos_token": "<|bos|>"}) for source in (CHAT_TEMPLATE, OLD_TEMPLATE))
CHOICE = {"$defs": {"Unit": {"enum": ["c", "f"], "type": "string"}}}


def samples(name: str, split: str = "heldout", count: int = 24) -> list[Sample]:
    return [getattr(tiny_tasks, name)(Random(f"{name} {seed}"), split) for seed in range(count)]


def calls_of(sample: Sample) -> list[Any]:
    calls = calls_in(sample.answer)
    assert calls
    return calls


def tool(properties: dict[str, Any], required: list[str], **more: Any) -> dict[str, Any]:
    parameters = {"title": "F", "type": "object", "properties": properties, "required": required, **more}
    return {"type": "function", "function": {"name": "f", "description": "Do it.\n\nArgs: x", "parameters": parameters}}


@pytest.fixture(scope="module")
def tokenizer():
    made = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.mark.parametrize("name", MAKERS)
def test_right_answers_pass_and_others_fail(name):
    for sample in samples(name):
        assert sample.check(sample.answer)
        if sample.kind != "story":
            assert not sample.check(sample.answer + " and")
            assert not sample.check(sample.answer[:-1])
        assert not sample.check("")


@pytest.mark.parametrize("name", MAKERS)
def test_a_seed_gives_one_sample_and_splits_differ(name):
    assert samples(name) == samples(name)
    prompts = [{json.dumps(s.messages) for s in samples(name, split, 150)} for split in ("train", "heldout")]
    assert len(prompts[0]) > 100
    assert name == "no_tool" or not prompts[0] & prompts[1]  # small talk and stories hold nothing out


def test_calls_are_compared_as_json():
    sample = next(s for s in samples("tool_call") if len(calls_of(s)[0]["arguments"]) > 1)
    call = calls_of(sample)[0]
    turned = {"arguments": dict(reversed(call["arguments"].items())), "name": call["name"]}
    assert sample.check(f"<tool_call>{json.dumps(turned, indent=1)}</tool_call>")
    assert not sample.check(f"<tool_call>{json.dumps(call | {'name': 'other'})}</tool_call>")
    assert not sample.check(f"<tool_call>{json.dumps(call)}</tool_call>" * 2)
    assert not sample.check(json.dumps(call))


@pytest.mark.parametrize("name", ["tool_call", "tool_calls", "tool_extract", "tool_chain"])
def test_calls_are_of_offered_tools_with_their_arguments(name):
    for sample in samples(name, "train"):
        offered = {item["function"]["name"]: item["function"]["parameters"] for item in sample.tools}
        assert len(offered) == len(sample.tools)
        for call in calls_of(sample) if sample.kind == "calls" else ():
            schema = offered[call["name"]]
            assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])
            types = {"string": str, "integer": int, "boolean": bool}
            for key, value in call["arguments"].items():
                assert type(value) is types[schema["properties"][key]["type"]]


def test_optional_parameters_are_given_and_left_out():
    num_given = []
    for sample in samples("tool_call", "train", 600):
        for item in sample.tools:
            parameters = item["function"]["parameters"]
            for call in calls_of(sample):
                if call["name"] == item["function"]["name"] and len(parameters["required"]) < len(
                    parameters["properties"]
                ):
                    num_given.append(len(parameters["properties"]) - len(call["arguments"]))
    assert set(num_given) == {0, 1}


def test_the_second_call_of_a_chain_takes_the_result_of_the_first():
    num_seconds = 0
    for sample in samples("tool_chain", count=60):
        if sample.kind == "calls" and sample.role == "tool":
            values = [str(value) for value in calls_of(sample)[0]["arguments"].values()]
            assert any(value in sample.prompt for value in values)
            num_seconds += 1
    assert num_seconds > 10


def test_an_answer_has_every_result():
    for sample in samples("tool_result"):
        results = [message["content"] for message in sample.messages if message["role"] == "tool"]
        assert results
        assert all(result in sample.answer for result in results)


def test_a_filled_schema_has_the_properties_in_order():
    num_schemas = 0
    for sample in samples("fill_schema"):
        text = " ".join(message["content"] for message in sample.messages)
        start = text.find("{")
        if start >= 0:
            schema = json.JSONDecoder().raw_decode(text[start:])[0]
            assert list(json.loads(sample.answer)) == list(schema["properties"]) == schema["required"]
            num_schemas += 1
    assert num_schemas > 15


@pytest.mark.parametrize("name", MAKERS)
def test_the_template_writes_what_the_training_writes(tokenizer, name):
    for sample in samples(name):
        tools = list(sample.tools) or None
        text = tokenizer.apply_chat_template(sample.messages, tools=tools, tokenize=False, add_generation_prompt=True)
        turns = tiny_tasks.flatten(sample.messages, sample.tools)
        wanted = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        assert text == f"<|bos|>{wanted}<|im_start|>assistant\n"
        assert TEMPLATE.render(sample.messages, tools=tools) == text


def test_chats_without_tools_are_written_as_before():
    for seed in range(8):
        chat = tiny_tasks.task_chat(Random(seed), 200)
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in chat]
        for messages in (chat, parts):
            for opens in (False, True):
                new, old = (template.render(messages, opens) for template in (TEMPLATE, BEFORE))
                assert new == old


def test_an_unknown_role_is_refused(tokenizer):
    with pytest.raises(TemplateError, match="Unknown role: narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "4"}], tokenize=False)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (tool({"a": {"title": "A", "type": "string"}}, ["a"], additionalProperties=False), "f(a: string)"),
        (tool({"a": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}, []), "f(a?: integer)"),
        (tool({"a": {"type": ["string", "null"]}}, ["a"], strict=True), "f(a: string)"),
        (tool({"u": {"$ref": "#/$defs/Unit"}}, ["u"], **CHOICE), "f(u: c|f)"),
        (tool({"u": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}}, [], **CHOICE), "f(u?: c|f)"),
        (tool({"u": {"$ref": "#/$defs/Missing"}}, ["u"]), "f(u: any)"),
        (tool({"u": {"type": "string", "enum": ["c", None]}, "x": {}}, ["u"]), "f(u: c, x?: any)"),
    ],
)
def test_schemas_of_client_libraries_become_one_line(tokenizer, given, line):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tools=[given], tokenize=False)
    begun = f"<|bos|><|im_start|>system\nBe brief.\n\nYou can call these tools:\n{line} Do it.<|im_end|>\n"
    assert text == f"{begun}<|im_start|>user\nHi<|im_end|>\n"
    assert TEMPLATE.render(messages, False, tools=[given]) == text


def test_a_tool_without_parameters_or_description(tokenizer):
    bare = {"type": "function", "function": {"name": "now"}}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools=[bare], tokenize=False)
    assert "You can call these tools:\nnow()<|im_end|>" in text


@pytest.mark.parametrize("name", ["tool_call", "tool_calls", "tool_extract"])
def test_the_router_reads_the_calls(name):
    for sample in samples(name):
        parser = TOOL_PARSERS["hermes"]({t["function"]["name"]: t["function"]["parameters"] for t in sample.tools})
        read: list[list[str]] = []
        for piece in [*parser.feed(sample.answer), *parser.finish()]:
            match piece:
                case CallStart(name=called):
                    read.append([called, ""])
                case CallArguments(text=part):
                    read[-1][1] += part
                case Content(text):
                    assert not text.strip()
        assert [{"name": called, "arguments": json.loads(text)} for called, text in read] == calls_of(sample)


def test_training_draws_tools_and_schemas():
    chats = [draw_chat(Random(seed), 256) for seed in range(300)]
    texts = [" ".join(message["content"] for message in chat) for chat in chats]
    assert 60 < sum("You can call these tools:" in text for text in texts) < 130
    assert 10 < sum('"properties"' in text for text in texts) < 50
