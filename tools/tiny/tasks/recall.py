"""Recall: a long text, and a question about one fact in it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tools.tiny.tasks.draw import Split, pick
from tools.tiny.tasks.facts import Fact, facts
from tools.tiny.tasks.grammar import estimate_tokens, filler
from tools.tiny.tasks.sample import Sample


def passage(rng: Random, stated: Sequence[Fact], num_tokens: int) -> str:
    """A text of about `num_tokens` tokens that states every fact of `stated` once, each at a random place."""
    room = num_tokens - sum(estimate_tokens(item.statement) for item in stated)
    sentences = filler(rng, max(int(room * 0.95), 0))  # 5%: numbers and breaks, which `filler` does not count
    for item in stated:
        sentences.insert(int(rng.random() * (len(sentences) + 1)), item.statement)
    size = rng.randint(4, 12)
    return "\n\n".join(" ".join(sentences[i : i + size]) for i in range(0, len(sentences), size))


def ask(rng: Random, text: str, question: str) -> str:
    """A user's message with `text` and a `question` about it."""
    lead = pick(rng, ("Read the text and answer the question.", "Here is a text.", "Text:", ""))
    return f"{lead}\n\n{text}\n\n{question}".strip()


def num_facts_for(rng: Random, num_tokens: int) -> int:
    """How many facts to state in a text of `num_tokens` tokens: from one up to about one per 100 tokens."""
    return rng.randint(1, max(2, min(24, num_tokens // 100)))


def recall(
    rng: Random, split: Split = "train", num_tokens: int = 200, num_facts: int = 0, plain: bool = False
) -> Sample:
    """Recall of one fact stated somewhere in a prompt of about `num_tokens` tokens, among distractor facts.

    `num_facts` includes the asked fact; 0 draws it. The fact's place in the text is uniform.
    """
    stated = facts(rng, num_facts or num_facts_for(rng, num_tokens), split)
    asked = pick(rng, stated)
    text = passage(rng, stated, num_tokens - 32)  # 32: the lead, the question and the template around them
    if plain:
        return Sample("recall_plain", f"{text}\n\n{asked.stem}", f" {asked.value}.", plain=True)
    return Sample("recall", ask(rng, text, asked.question), asked.statement)
