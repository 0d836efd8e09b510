"""Tasks on lists: sorting, reversing, repeating, counting items, and counting from one number to another."""

from __future__ import annotations

from random import Random

from tools.tiny.tasks.draw import Split, draw, pick
from tools.tiny.tasks.grammar import commas
from tools.tiny.tasks.sample import Sample
from tools.tiny.tasks.words import WORDS


def sort_numbers(rng: Random, split: Split = "train") -> Sample:
    """Three to eight different numbers up to 99, to be sorted up or down."""
    numbers = draw(lambda: rng.sample(range(100), rng.randint(3, 8)), str, split)
    down = rng.random() < 0.3
    order = "largest to smallest" if down else "smallest to largest"
    prompt = f"Sort these numbers from {order}: {commas(numbers)}"
    return Sample("sort_numbers", prompt, commas(sorted(numbers, reverse=down)))


def sort_words(rng: Random, split: Split = "train") -> Sample:
    """Three to six different words, to be sorted alphabetically."""
    words = draw(lambda: rng.sample(WORDS, rng.randint(3, 6)), str, split)
    return Sample("sort_words", f"Sort these words alphabetically: {commas(words)}", commas(sorted(words)))


REVERSIBLE = (
    (WORDS, "these words", " "),
    (WORDS, "this list", ", "),
    (list("abcdefghijklmnopqrstuvwxyz"), "these letters", " "),
)


def reverse(rng: Random, split: Split = "train") -> Sample:
    """Three to ten words or letters, to be written in reverse order."""
    pool, what, joint = pick(rng, REVERSIBLE)
    items = draw(lambda: [pick(rng, pool) for _ in range(rng.randint(3, 10))], str, split)
    return Sample("reverse", f"Reverse {what}: {joint.join(items)}", joint.join(reversed(items)))


def repeat(rng: Random, split: Split = "train") -> Sample:
    """Words and numbers to be repeated unchanged."""
    items = draw(lambda: [_word_or_number(rng) for _ in range(rng.randint(3, 20))], str, split)
    text = " ".join(items)
    return Sample("repeat", f"Repeat after me: {text}", text)


def _word_or_number(rng: Random) -> str:
    return pick(rng, WORDS) if rng.random() < 0.7 else str(int(rng.random() * 1000))


def count_items(rng: Random, split: Split = "train") -> Sample:
    """How many times a word appears in a list of up to ten words; the answer is 0 to 5."""
    items = draw(lambda: _list_with_repeats(rng), str, split)
    word = items[0]
    rest = items[1:]
    prompt = f"How many times does {word} appear in this list: {commas(rest)}"
    number = rest.count(word)
    return Sample("count_items", prompt, f"{word} appears {number} {'time' if number == 1 else 'times'}.")


def _list_with_repeats(rng: Random) -> list[str]:
    """The word to count, followed by the list."""
    words = rng.sample(WORDS, rng.randint(2, 5))
    number = rng.randint(0, 5)
    rest = [words[0]] * number + [pick(rng, words[1:]) for _ in range(rng.randint(1, 10 - number))]
    rng.shuffle(rest)
    return [words[0], *rest]


def count_up(rng: Random, split: Split = "train", span: int = 0) -> Sample:
    """Counting up or down between two numbers up to 150: a long answer.

    `span` fixes the number of steps; it then counts up from any number and ignores `split`, since some spans have no
    held-out range at all.
    """
    low, steps = (
        (rng.randint(0, 150 - span), span)
        if span
        else draw(lambda: _count_range(rng), lambda drawn: f"count {drawn[0]} {drawn[1]}", split)
    )
    numbers = list(range(low, low + steps + 1))
    if not span and rng.random() < 0.25:
        return Sample("count_down", f"Count down from {numbers[-1]} to {low}.", commas(numbers[::-1]))
    return Sample("count_up", f"Count from {low} to {numbers[-1]}.", commas(numbers))


def _count_range(rng: Random) -> tuple[int, int]:
    """The lowest number and the number of steps: 1 to 99, most often few."""
    steps = int(1 + 99 * rng.random() ** 3)
    return rng.randint(0, 150 - steps), steps
