"""Chats of many turns, about facts told earlier or about long texts."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tools.tiny.tasks.draw import Split, pick
from tools.tiny.tasks.facts import Fact, facts, new_facts
from tools.tiny.tasks.grammar import estimate_tokens
from tools.tiny.tasks.mix import short_task
from tools.tiny.tasks.recall import ask, num_facts_for, passage, recall
from tools.tiny.tasks.sample import Message, Sample


def exchange(sample: Sample) -> list[Message]:
    """A sample's last user message and its answer, as two messages."""
    return [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.answer}]


def tell(rng: Random, stated: Sequence[Fact]) -> list[Message]:
    """The turn in which the user tells facts, and the assistant's acknowledgement."""
    lead = pick(rng, ("Please remember: ", "Remember this. ", "Note: ", ""))
    content = lead + " ".join(item.statement for item in stated)
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "I will remember that."}]


def question_turn(rng: Random, known: Sequence[Fact]) -> list[Message]:
    """A question about one of the `known` facts, and its answer."""
    asked = pick(rng, known)
    return [{"role": "user", "content": asked.question}, {"role": "assistant", "content": asked.statement}]


def chat_recall(rng: Random, split: Split = "train", num_turns: int = 4) -> Sample:
    """Recall of a fact told in an earlier turn of the chat, with other tasks asked in the turns between."""
    stated = facts(rng, rng.randint(1, 3), split)
    history = tell(rng, stated)
    for _ in range(num_turns):
        history += exchange(short_task(rng, split))
    asked = pick(rng, stated)
    return Sample("chat_recall", asked.question, asked.statement, history=tuple(history))


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are baton-tiny, a helpful assistant.",
    "Answer briefly.",
    "You are a friendly assistant. Answer the user's questions.",
    "Be brief and exact.",
)


def maybe_system(rng: Random) -> list[Message]:
    """A system message a third of the time."""
    return [{"role": "system", "content": pick(rng, SYSTEM_PROMPTS)}] if rng.random() < 0.33 else []


def task_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat of short tasks, with facts told and asked for turns later, that ends near `num_tokens` tokens."""
    messages = maybe_system(rng)
    known: list[Fact] = []
    count = 0
    while count < num_tokens:
        turn = _next_turn(rng, known, split)
        count += sum(estimate_tokens(message["content"]) + 5 for message in turn)
        messages += turn
    return messages


def _next_turn(rng: Random, known: list[Fact], split: Split) -> list[Message]:
    draw = rng.random()
    if draw < 0.12:
        new = new_facts(rng, known, split)
        known += new
        if new:
            return tell(rng, new)
    if draw < 0.25 and known:
        return question_turn(rng, known)
    if draw < 0.45:
        return exchange(recall(rng, split, num_tokens=int(40 + 160 * rng.random())))
    return exchange(short_task(rng, split))


def document_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat about one long text of up to `num_tokens` tokens: a question with it, then further questions."""
    size = int(num_tokens * (0.45 + 0.55 * rng.random()))
    stated = facts(rng, num_facts_for(rng, size), split)
    text = passage(rng, stated, size - 32)
    first = question_turn(rng, stated)
    if rng.random() < 0.2:
        messages = [{"role": "system", "content": f"Use this text.\n\n{text}"}, *first]
    elif rng.random() < 0.15:
        messages = [*tell_text(rng, text), *first]
    else:
        messages = [*maybe_system(rng), {"role": "user", "content": ask(rng, text, first[0]["content"])}, first[1]]
    count = size
    while count < num_tokens:
        turn = question_turn(rng, stated) if rng.random() < 0.9 else exchange(short_task(rng, split))
        count += sum(estimate_tokens(message["content"]) + 5 for message in turn)
        messages += turn
    return messages


def tell_text(rng: Random, text: str) -> list[Message]:
    """A turn that only hands over a text."""
    lead = pick(rng, ("Please read this text.", "Here is a text."))
    return [{"role": "user", "content": f"{lead}\n\n{text}"}, {"role": "assistant", "content": "I have read it."}]


def chunked_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat whose every turn brings a piece of text and asks about this or any earlier piece."""
    messages, known, count = maybe_system(rng), facts(rng, 2, split), 0
    unstated = list(known)
    while count < num_tokens:
        size = int(40 + rng.random() * num_tokens / 5)
        text = passage(rng, unstated, size)
        turn = question_turn(rng, known)
        turn[0] = {"role": "user", "content": f"{text}\n\n{turn[0]['content']}"}
        count += sum(estimate_tokens(message["content"]) + 5 for message in turn)
        messages += turn
        unstated = new_facts(rng, known, split)
        known += unstated
    return messages
