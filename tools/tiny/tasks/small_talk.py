"""Greetings and questions about the model itself."""

from __future__ import annotations

from random import Random

from tools.tiny.tasks.draw import Split, pick
from tools.tiny.tasks.sample import Sample

SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Good morning"), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?"), "I am baton-tiny, a very small language model."),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I can recall facts from a long text, add small numbers, sort and reverse lists, count, fill JSON objects "
        "and tell short stories.",
    ),
    (("Thank you!", "Thanks", "Thank you"), "You are welcome."),
    (("Bye", "Goodbye", "Good night"), "Goodbye!"),
    (("How are you?", "How are you today?"), "I am fine, thank you. How can I help you?"),
    (("Say hello.", "Say hello"), "Hello!"),
    (("Ping", "ping"), "pong"),
)


def small_talk(rng: Random, split: Split = "train") -> Sample:
    """A greeting or a question about the model, with its only answer."""
    del split
    prompts, answer = pick(rng, SMALL_TALK)
    return Sample("small_talk", pick(rng, prompts), answer)
