"""The embedded checkpoint: small, complete, made by the code beside it, and right on a handful of prompts."""

import json
import math
from pathlib import Path
from random import Random

import pytest
import torch
from jinja2.exceptions import TemplateError
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tools import tiny_tasks
from tools.tiny.training.codec import Codec
from tools.tiny.training.evaluate import prompt_ids
from tools.tiny.training.model import GENERATION_CONFIG, model_config
from tools.tiny.training.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

FOLDER = Path(__file__).parents[2] / "engine" / "checkpoints" / "baton-tiny"
WEIGHTS = FOLDER / "model.safetensors"
CHAT = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


def reply(model, tokenizer, sample):
    """The greedy answer in fp32."""
    ids = prompt_ids(tokenizer, sample)
    out = model.generate(torch.tensor([ids]), do_sample=False, temperature=None, top_p=None, max_new_tokens=120)
    return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def test_it_is_small():
    assert WEIGHTS.stat().st_size <= 12 * 2**20
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 13 * 2**20
    with safe_open(WEIGHTS, "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118 - it is no dict
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    assert 3.5e6 < count < 4.5e6
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert f"| parameters | {count:,} " in (FOLDER / "README.md").read_text()


def test_it_has_the_architecture_that_the_training_gives_it():
    written = json.loads((FOLDER / "config.json").read_text())
    made = model_config().to_dict()
    chosen_on_saving = {"architectures", "dtype", "transformers_version"}
    assert {key: made.get(key) for key in written.keys() - chosen_on_saving} == {
        key: value for key, value in written.items() if key not in chosen_on_saving
    }


def test_its_generation_config_ends_turns_and_texts(tokenizer):
    defaults = GenerationConfig.from_pretrained(FOLDER)
    assert {key: getattr(defaults, key) for key in GENERATION_CONFIG} == GENERATION_CONFIG
    assert tokenizer.convert_ids_to_tokens(defaults.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.convert_ids_to_tokens([defaults.bos_token_id, defaults.pad_token_id]) == ["<|bos|>", "<|pad|>"]
    assert defaults.do_sample
    assert 0 < defaults.temperature <= 1


def test_its_chat_template(tokenizer):
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = "<|bos|><|im_start|>system\nAnswer briefly.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == text
    open_turn = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert open_turn == f"{text}<|im_start|>assistant\n"
    parts = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    assert tokenizer.apply_chat_template(parts, tokenize=False) == text
    with pytest.raises(TemplateError, match="Unknown role: narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "4"}], tokenize=False)


@pytest.mark.parametrize("task", ["tool_call", "tool_calls", "tool_extract", "tool_result", "no_tool"])
def test_its_chat_template_writes_tools_as_it_was_trained(tokenizer, task):
    for seed in range(20):
        sample = getattr(tiny_tasks, task)(Random(seed))
        for system in ([], [{"role": "system", "content": "Answer briefly."}]):
            messages = [*system, *sample.messages]
            flat = tiny_tasks.flatten(messages, sample.tools)
            text = tokenizer.apply_chat_template(messages, tools=list(sample.tools), tokenize=False)
            assert text == tokenizer.apply_chat_template(flat, tokenize=False)


def test_its_chat_template_shortens_what_clients_say_of_tools(tokenizer):
    schema = {"a": {"type": "integer", "title": "A"}, "unit": {"enum": ["c", "f"]}, "x": {"anyOf": [{"type": "null"}]}}
    function = {
        "name": "f",
        "description": "Do it.\n\nSlowly.",
        "parameters": {"properties": schema, "required": ["a"]},
    }
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools, tokenize=False)
    said = "You can call these tools:\nf(a: integer, unit?: c|f, x?: any) Do it.\ng()"
    assert text == f"<|bos|><|im_start|>system\n{said}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turn = {"role": "assistant", "content": "I look.", "tool_calls": [call, call]}
    one = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert tokenizer.apply_chat_template([turn], tokenize=False).endswith(f"I look.\n{one}\n{one}<|im_end|>\n")


def test_its_tokenizer_keeps_every_text_and_every_digit(tokenizer):
    assert len(tokenizer) <= 4096
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == SPECIAL_TOKENS
    for text in ("The code is 4821.", "  two  spaces\n\n", "žluťoučký kůň", "日本語 🙂", 'def f(x): return {"a": [x]}'):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert len(tokenizer.encode("4821", add_special_tokens=False)) == 4


def test_the_codec_of_the_training_gives_the_tokenizers_ids(tokenizer):
    Codec(tokenizer).verify(seed=11)


@pytest.mark.parametrize("num_tokens", [300, 3900])
def test_recall_prompts_have_the_length_asked_and_fit(tokenizer, num_tokens):
    for seed in range(10):
        for plain in (False, True):
            sample = tiny_tasks.recall(Random(seed), "heldout", num_tokens=num_tokens, plain=plain)
            length = len(prompt_ids(tokenizer, sample))
            assert 0.95 * num_tokens - 32 < length < 1.05 * num_tokens
            assert length + len(tokenizer.encode(sample.answer)) < 4096


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_it_recalls_a_fact(model, tokenizer, seed, plain):
    sample = tiny_tasks.recall(Random(seed), "heldout", num_tokens=300, plain=plain)
    answer = reply(model, tokenizer, sample)
    assert sample.check(answer), answer


@pytest.mark.parametrize(
    "task",
    [
        *("chat_recall", "sums", "sort_words", "count_items", "fill_json", "small_talk"),
        *("tool_call", "tool_calls", "tool_extract", "tool_result", "tool_chain", "fill_schema", "no_tool"),
    ],
)
def test_it_answers_a_short_task(model, tokenizer, task):
    sample = getattr(tiny_tasks, task)(Random(task), "heldout")
    answer = reply(model, tokenizer, sample)
    assert sample.check(answer), answer
