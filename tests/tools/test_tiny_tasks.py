"""The generated tasks: right answers pass, wrong ones fail, texts are as long as asked, held-out content stays out."""

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tools import tiny_tasks
from tools.tiny.tasks.draw import draw
from tools.tiny_tasks import HELDOUT_ONE_IN, Sample, Split, estimate_tokens

ROOT = Path(__file__).parents[2]

TASKS: dict[str, Callable[[Random, Split], Sample]] = {
    **{name: task for name, (task, _) in tiny_tasks.SHORT_TASKS.items()},
    "story_plain": tiny_tasks.story_plain,
    "sums_plain": lambda rng, split: tiny_tasks.sums(rng, split, plain=True),
    "recall": tiny_tasks.recall,
    "recall_plain": lambda rng, split: tiny_tasks.recall(rng, split, plain=True),
    "chat_recall": tiny_tasks.chat_recall,
    "tool_call": tiny_tasks.tool_call,
    "tool_calls": tiny_tasks.tool_calls,
    "tool_extract": tiny_tasks.tool_extract,
    "tool_result": tiny_tasks.tool_result,
    "no_tool": tiny_tasks.no_tool,
}
SPLITS: tuple[Split, ...] = ("train", "heldout")
NUM_SEEDS = 60


def samples(name: str, split: Split, count: int = NUM_SEEDS) -> list[Sample]:
    return [TASKS[name](Random(f"{name} {seed}"), split) for seed in range(count)]


def belongs(content: str) -> Split:
    return "heldout" if zlib.crc32(content.encode()) % HELDOUT_ONE_IN == 0 else "train"


def test_the_standard_library_is_enough():
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tools.tiny_tasks"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", TASKS)
def test_right_answers_pass_and_wrong_ones_fail(name, split):
    for sample in samples(name, split):
        assert sample.check(sample.answer)
        assert sample.check(f" {sample.answer}\n")  # a model may begin and end as it likes
        for wrong in ("", sample.answer[:-1], f"{sample.answer} and", sample.prompt):
            assert not sample.check(wrong), wrong


@pytest.mark.parametrize("name", [name for name in TASKS if "story" not in name])
def test_the_answer_to_another_prompt_fails(name):
    given = samples(name, "train")
    for first, second in pairwise(given):
        assert first.check(second.answer) == (first.answer.strip() == second.answer.strip())


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_one_sample(name):
    assert samples(name, "train") == samples(name, "train")
    assert len({sample.prompt for sample in samples(name, "train")}) > NUM_SEEDS / 4


def test_json_is_compared_as_json():
    sample = samples("fill_json", "heldout")[0]
    right = json.loads(sample.answer)
    assert sample.check(json.dumps(dict(reversed(right.items())), indent=3))
    assert not sample.check(json.dumps(right | {"name": "nobody"}))
    assert not sample.check(json.dumps(right | {"more": 1}))
    assert not sample.check("[]")


def test_a_story_is_judged_by_its_hero_its_sentences_and_its_end():
    sample = samples("story", "train")[0]
    hero = sample.mentions[0]
    assert hero in sample.prompt
    assert not sample.check(sample.answer.replace(hero, "unicorn"))
    assert not sample.check(f"{sample.answer} {sample.answer}")
    assert not sample.check(f"The {hero} slept.")


def test_a_plain_sample_has_no_messages():
    with pytest.raises(ValueError, match=r"send \.prompt"):
        _ = samples("sums_plain", "train")[0].messages


def test_a_chat_sample_ends_with_the_users_turn():
    for sample in samples("chat_recall", "heldout"):
        assert [message["role"] for message in sample.messages] == ["user", "assistant"] * 5 + ["user"]
        assert sample.messages[-1]["content"] == sample.prompt
        assert sample.answer in sample.messages[0]["content"]


@pytest.mark.parametrize("num_tokens", [100, 300, 1500, 3900])
def test_recall_is_about_as_long_as_asked(num_tokens):
    for seed in range(10):
        for plain in (False, True):
            sample = tiny_tasks.recall(Random(seed), "heldout", num_tokens=num_tokens, plain=plain)
            assert 0.97 * num_tokens - 32 < estimate_tokens(sample.prompt) < 1.03 * num_tokens
            assert not sample.check(sample.prompt.splitlines()[-1])


@pytest.mark.parametrize("num_tokens", [200, 1000])
@pytest.mark.parametrize("make", [tiny_tasks.task_chat, tiny_tasks.document_chat, tiny_tasks.chunked_chat])
def test_chats_reach_the_length_asked(make, num_tokens):
    for seed in range(10):
        chat = make(Random(seed), num_tokens)
        num_made = sum(estimate_tokens(message["content"]) + 5 for message in chat)  # 5: the template around each
        assert 0.95 * num_tokens < num_made < num_tokens + 500
        assert [m["role"] for m in chat if m["role"] != "system"] == ["user", "assistant"] * (len(chat) // 2)


@pytest.mark.parametrize("num_facts", [1, 5])
def test_recall_states_the_asked_fact_once_among_others(num_facts):
    for seed in range(20):
        sample = tiny_tasks.recall(Random(seed), "train", num_tokens=400, num_facts=num_facts)
        assert sample.prompt.count(sample.answer) == 1


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def listed(sample: Sample) -> list[str]:
    return re.split(r",? ", sample.prompt.split(": ", 1)[1])


def sum_of(terms: list[int]) -> str:
    return "+".join(map(str, sorted(terms)))


def counted(sample: Sample) -> str:
    low, high = sorted(numbers(sample.prompt))
    return f"count {low} {high - low}"


CONTENT: dict[str, Callable[[Sample], str]] = {  # what says the split of a sample, read back from its text
    "sums": lambda sample: sum_of(numbers(sample.prompt)),
    "sums_plain": lambda sample: sum_of(numbers(sample.prompt)),
    "sums3": lambda sample: sum_of(numbers(sample.prompt)),
    "sort_numbers": lambda sample: str(numbers(sample.prompt)),
    "sort_words": lambda sample: str(listed(sample)),
    "reverse": lambda sample: str(listed(sample)),
    "repeat": lambda sample: str(listed(sample)),
    "count_items": lambda sample: str([sample.prompt.split()[4], *listed(sample)]),
    "count_up": counted,
    "recall": lambda sample: sample.answer,
    "recall_plain": lambda sample: sample.prompt.splitlines()[-1] + sample.answer,
    "chat_recall": lambda sample: sample.answer,
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", CONTENT)
def test_content_belongs_to_the_split_asked_for(name, split):
    for sample in samples(name, split):
        assert belongs(CONTENT[name](sample)) == split, sample


@pytest.mark.parametrize("name", CONTENT)
def test_training_never_draws_what_a_held_out_sample_asks(name):
    content = CONTENT[name]
    seen = {content(sample) for sample in samples(name, "train", 400)}
    assert not seen & {content(sample) for sample in samples(name, "heldout")}


def test_the_steps_of_long_sums_are_training_sums():
    for split in SPLITS:
        for sample in samples("sums3", split):
            a, b, c = numbers(sample.prompt)
            assert belongs(sum_of([a, b])) == belongs(sum_of([a + b, c])) == "train"


@pytest.mark.parametrize("make", [tiny_tasks.task_chat, tiny_tasks.document_chat, tiny_tasks.chunked_chat])
def test_training_chats_ask_for_no_held_out_fact(make):
    num_asked = 0
    for seed in range(20):
        chat = make(Random(seed), 1000)
        for question, answer in pairwise(chat):
            asked = question["content"].splitlines()[-1]
            if answer["role"] == "assistant" and re.match(r"What is the (?!\d)|Where ", asked):
                assert belongs(answer["content"]) == "train"
                num_asked += 1
    assert num_asked > 20


def test_a_split_without_content_is_an_error():
    other: Split = "train" if belongs("7") == "heldout" else "heldout"
    with pytest.raises(ValueError, match=f"no {other} content"):
        draw(lambda: 7, str, other)


def test_a_passage_is_its_facts_and_filler():
    stated = tiny_tasks.facts(Random(3), 6)
    text = tiny_tasks.passage(Random(3), stated, 500)
    assert all(text.count(fact.statement) == 1 for fact in stated)
    assert len({fact.question for fact in stated}) == 6


@pytest.mark.parametrize("split", SPLITS)
def test_questions_for_tools_belong_to_their_split(split):
    for sample in samples("tool_call", split, 200):
        parameters = sample.tools[0]["function"]["parameters"]["properties"].values()
        if any(schema["type"] != "boolean" for schema in parameters) and len(sample.tools) == 1:
            assert belongs(sample.prompt) == split


def test_chats_with_tools_end_in_answers_and_have_a_result_for_each_call():
    for seed in range(100):
        chat = tiny_tasks.tool_chat(Random(seed), 300)
        assert chat[0]["role"] == "system"
        assert chat[-1]["role"] == "assistant"
        num_calls = sum(message["content"].count("<tool_call>") for message in chat[:-1])
        assert num_calls == sum(message["role"] == "tool" for message in chat)
