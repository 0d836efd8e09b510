"""How often each task is drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tools.tiny.tasks.arithmetic import sums, sums3
from tools.tiny.tasks.draw import Split
from tools.tiny.tasks.lists import count_items, count_up, repeat, reverse, sort_numbers, sort_words
from tools.tiny.tasks.people import fill_json
from tools.tiny.tasks.recall import recall
from tools.tiny.tasks.sample import Sample
from tools.tiny.tasks.small_talk import small_talk
from tools.tiny.tasks.stories import long_story, story, story_plain

TaskFn = Callable[[Random, Split], Sample]
SHORT_TASKS: dict[str, tuple[TaskFn, float]] = {  # name -> (task, its share of the short tasks)
    "sums": (sums, 0.14),
    "sums3": (sums3, 0.08),
    "sort_numbers": (sort_numbers, 0.13),
    "sort_words": (sort_words, 0.10),
    "reverse": (reverse, 0.09),
    "repeat": (repeat, 0.05),
    "count_items": (count_items, 0.15),
    "count_up": (count_up, 0.07),
    "fill_json": (fill_json, 0.10),
    "story": (story, 0.05),
    "long_story": (long_story, 0.02),
    "small_talk": (small_talk, 0.02),
}
_TASKS = [task for task, _ in SHORT_TASKS.values()]
_SHARES = [share for _, share in SHORT_TASKS.values()]


def short_task(rng: Random, split: Split = "train") -> Sample:
    """A sample of one of `SHORT_TASKS`, drawn according to their shares."""
    return rng.choices(_TASKS, _SHARES)[0](rng, split)


def plain_task(rng: Random, num_tokens: int, split: Split = "train") -> Sample:
    """A plain completion of up to about `num_tokens` tokens: a story, a sum or, most often, recall."""
    draw = rng.random()
    if draw < 0.15 or (draw < 0.3 and num_tokens < 100):
        return sums(rng, split, plain=True)
    if draw < 0.35:
        return story_plain(rng, split)
    return recall(rng, split, num_tokens=int(num_tokens * (0.5 + 0.45 * rng.random())), plain=True)
