"""Stories about an animal: the long, open-ended answers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tools.tiny.tasks.draw import Split, pick
from tools.tiny.tasks.grammar import article
from tools.tiny.tasks.sample import Sample
from tools.tiny.tasks.words import (
    ADJECTIVES,
    ADVERBS,
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    JOBS,
    MOTIONS,
    NAMES,
    PLACES,
    THINGS,
    WEATHER,
)


def story_text(rng: Random, hero: str, num_middles: int) -> str:
    """A story about the animal `hero`: an opening, `num_middles` scenes and an end."""
    name, friend = pick(rng, NAMES), pick(rng, ANIMALS)
    while friend == hero:
        friend = pick(rng, ANIMALS)
    thing, place, home = pick(rng, THINGS), pick(rng, PLACES), pick(rng, PLACES)
    colour = pick(rng, COLOURS)
    opening = _story_opening(rng, hero, name, home)
    found = f"One {pick(rng, WEATHER)} day {name} found {article(colour)} {thing} in the {place}."
    scenes = [found, *_story_scenes(rng, hero, name, friend, thing, place)]
    return " ".join([opening, *scenes[:num_middles], _story_ending(rng, hero, name, friend)])


def _story_opening(rng: Random, hero: str, name: str, home: str) -> str:
    what = [f"{article(pick(rng, ADJECTIVES))} {hero}" for _ in range(3)]
    openings = (
        f"Once upon a time there was {what[0]} called {name}. {name} lived near the {home}.",
        f"{name} was {what[1]} who lived behind the {home}.",
        f"In a small house by the {home} lived {what[2]}. The {hero} was called {name}.",
    )
    return pick(rng, openings)


def _story_scenes(rng: Random, hero: str, name: str, friend: str, thing: str, place: str) -> list[str]:
    p = pick
    return [
        f"{name} {p(rng, ADVERBS)} carried the {thing} home and put it next to the door.",
        f'"Whose {thing} is this?" asked {name}. Nobody knew.',
        f"A {friend} came by and looked at the {thing}.",
        f'"That is my {thing}," said the {friend}. "I lost it in the {place}."',
        f"The {hero} was {p(rng, ('sad', 'surprised', 'a little worried'))} for a moment, but then {name} smiled.",
        f"{name} gave the {thing} back, and the {friend} was very {p(rng, ('happy', 'glad', 'thankful'))}.",
        f"Together they {p(rng, MOTIONS)} to the {p(rng, PLACES)} and shared some {p(rng, FOODS)}.",
        f"On the way they met {article(p(rng, JOBS))} from {p(rng, CITIES)}, "
        f"who told them a {p(rng, ADJECTIVES)} story.",
        f"They laughed until the {p(rng, ('moon', 'first star', 'evening star'))} came up over the {p(rng, PLACES)}.",
        f"The next morning the {friend} came back with {p(rng, FOODS)} and {p(rng, FOODS)}.",
        f"It was {p(rng, WEATHER)}, so they stayed inside and played with the {p(rng, THINGS)} all day.",
    ]


def _story_ending(rng: Random, hero: str, name: str, friend: str) -> str:
    endings = (
        f"From that day on, the {hero} and the {friend} were the best of friends.",
        f"That night {name} went to sleep, tired and happy.",
        f"And {name} never forgot that {pick(rng, WEATHER)} day.",
    )
    return pick(rng, endings)


def story(rng: Random, split: Split = "train", num_middles: int = 0) -> Sample:
    """An open-ended prompt: a story of 50 to 250 tokens about an animal; any whole story that mentions it is right."""
    del split  # any good story is right
    hero = pick(rng, ANIMALS)
    middles = num_middles or rng.randint(3, 8)
    long = middles > 8
    prompt = (
        f"Tell me a long story about a {hero}."
        if long
        else pick(
            rng,
            (f"Tell me a short story about a {hero}.", f"Write a story about a {hero}.", f"Tell me about a {hero}."),
        )
    )
    return Sample("story", prompt, story_text(rng, hero, middles), kind="story", mentions=(hero,))


def long_story(rng: Random, split: Split = "train") -> Sample:
    """A story of about 150 to 250 tokens."""
    return replace(story(rng, split, num_middles=rng.randint(9, 12)), task="long_story")


def story_plain(rng: Random, split: Split = "train") -> Sample:
    """The opening words of a story as plain text, to be continued."""
    del split
    hero = pick(rng, ANIMALS)
    words = story_text(rng, hero, rng.randint(3, 12)).split(" ")
    cut = rng.randint(3, 12)
    return Sample("story_plain", " ".join(words[:cut]), " " + " ".join(words[cut:]), kind="story", plain=True)
