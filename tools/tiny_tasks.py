"""Generated tasks with checkable answers, on which baton-tiny is trained, tested and demonstrated.

Every task is a pure function of a `random.Random` and uses only the standard library, so training, evaluation, tests,
benchmarks and the demo all draw from the same source. A task function returns a `Sample`: the chat messages (or the
plain text to be continued), the expected answer, and `Sample.check` for a given answer.

Held-out data is split by content, not only by seed: the CRC-32 of its text decides which split a fact, a sum or a list
belongs to (one in sixteen is held out), so a held-out sample cannot have been seen in training.

    sample = recall(random.Random(7), "heldout", num_tokens=1500)
    sample.messages      # what to send to the chat endpoint
    sample.check(reply)  # whether the reply is right

This is the public interface of the package `tools.tiny.tasks`.
"""

from __future__ import annotations

from tools.tiny.tasks.arithmetic import sums, sums3
from tools.tiny.tasks.chats import (
    chat_recall,
    chunked_chat,
    document_chat,
    exchange,
    maybe_system,
    question_turn,
    task_chat,
    tell,
    tell_text,
)
from tools.tiny.tasks.draw import HELDOUT_ONE_IN, Split, in_split
from tools.tiny.tasks.facts import Fact, fact, facts, new_facts, secret_code
from tools.tiny.tasks.grammar import estimate_tokens, filler, filler_sentence, invented_name
from tools.tiny.tasks.lists import count_items, count_up, repeat, reverse, sort_numbers, sort_words
from tools.tiny.tasks.mix import SHORT_TASKS, TaskFn, plain_task, short_task
from tools.tiny.tasks.people import fill_json
from tools.tiny.tasks.recall import ask, num_facts_for, passage, recall
from tools.tiny.tasks.sample import CheckKind, Message, Sample
from tools.tiny.tasks.schemas import fill_schema, schema_chat
from tools.tiny.tasks.small_talk import small_talk
from tools.tiny.tasks.stories import long_story, story, story_plain, story_text
from tools.tiny.tasks.tool_calls import (
    flatten,
    no_tool,
    tool_call,
    tool_calls,
    tool_chat,
    tool_extract,
    tool_result,
)
from tools.tiny.tasks.tool_chains import chain, tool_chain

__all__ = [
    # samples and splits
    "Sample",
    "Message",
    "CheckKind",
    "Split",
    "HELDOUT_ONE_IN",
    "in_split",
    # recall
    "recall",
    "chat_recall",
    "Fact",
    "fact",
    "facts",
    "new_facts",
    "secret_code",
    "passage",
    "ask",
    "num_facts_for",
    # short tasks
    "sums",
    "sums3",
    "sort_numbers",
    "sort_words",
    "reverse",
    "repeat",
    "count_items",
    "count_up",
    "fill_json",
    "small_talk",
    "SHORT_TASKS",
    "TaskFn",
    "short_task",
    "plain_task",
    # tools
    "tool_call",
    "tool_calls",
    "tool_extract",
    "tool_result",
    "tool_chain",
    "chain",
    "no_tool",
    "fill_schema",
    "schema_chat",
    "tool_chat",
    "flatten",
    # stories and filler
    "story",
    "long_story",
    "story_plain",
    "story_text",
    "filler",
    "filler_sentence",
    "invented_name",
    "estimate_tokens",
    # whole chats
    "task_chat",
    "document_chat",
    "chunked_chat",
    "exchange",
    "tell",
    "tell_text",
    "question_turn",
    "maybe_system",
]
