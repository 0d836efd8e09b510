"""What the demo shows. Each scene checks its results and raises DemoFailed if they are wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from tools import tiny_tasks
from tools.demo.client import Client, Reply
from tools.demo.cluster import Blocks, Cluster, DemoFailed
from tools.demo.typewriter import Typewriter
from tools.tiny_tasks import Sample

TEXT_TOKENS = 1500
CANCEL_AFTER_CHUNKS = 50
CANCEL_OF_TOKENS = 3000
BLOCKS_TIMEOUT_S = 10.0
BLOCKS_PERIOD_S = 0.1
CACHED_SHARE = 0.9
"""Least share of a repeated prompt found in the cache: all full blocks but the last, which is needed for its logits."""
EIGHT = ("sums", "sums3", "sort_numbers", "sort_words", "reverse", "count_items", "fill_json", "small_talk")
SEED = 7


class Show:
    """The scenes, in order. `replies` collects every finished request for the table at the end."""

    def __init__(self, console: Console, cluster: Cluster, client: Client) -> None:
        self._console = console
        self._cluster = cluster
        self._client = client
        self.replies: list[Reply] = []

    async def streamed_answer(self) -> None:
        self._title("A chat answer, as it comes")
        sample = tiny_tasks.story(Random(SEED), "heldout")
        self._question(sample.prompt)
        writer = Typewriter(self._console, indent=4)
        await self._ask("story", sample, writer.write)
        writer.end()

    async def fact_in_a_long_text(self) -> None:
        self._title("A fact in a long text, asked twice")
        sample = tiny_tasks.recall(Random(SEED), "heldout", num_tokens=TEXT_TOKENS)
        question = sample.prompt.splitlines()[-1]
        first = await self._ask("fact", sample)
        self._question(f"({first.num_prompt_tokens:,} tokens of text) {question}")
        self._answer(first)
        self._note(_handover(first))
        second = await self._ask("fact, again", sample)
        self._question("(the same again)")
        self._answer(second)
        cached = {place: second.timings[key] for place, key in _CACHED.items()}
        prefill, decode = second.timings["prefill_node"], second.timings["decode_node"]
        self._note(f"{prefill} had {cached['prefill']:,} of the tokens in its cache, {decode} {cached['decode']:,}")
        self._note(_handover(second))
        for place, num_tokens in cached.items():
            if num_tokens < CACHED_SHARE * second.num_prompt_tokens:
                raise DemoFailed(f"only {num_tokens} prompt tokens were cached on the {place} node")

    async def eight_at_once(self) -> None:
        self._title("Eight requests at once")
        samples = [getattr(tiny_tasks, task)(Random(SEED), "heldout") for task in EIGHT]
        began = time.monotonic()
        async with self._busy("eight answers"):
            replies = await asyncio.gather(*(self._ask(s.task.replace("_", " "), s) for s in samples))
        for sample, reply in zip(samples, replies, strict=True):
            self._question(sample.prompt)
            self._answer(reply)
        num_tokens = sum(reply.num_tokens for reply in replies)
        self._note(f"{num_tokens} tokens in {time.monotonic() - began:.1f} s")

    async def cancelled(self) -> None:
        self._title("A request cancelled half-way")
        sample = tiny_tasks.long_story(Random(SEED), "heldout")
        node = self.replies[0].timings["decode_node"]
        before = await self._blocks(node, lambda blocks: not blocks.in_use)
        self._question(f"{sample.prompt} (and go on for {CANCEL_OF_TOKENS:,} tokens)")
        async with self._busy("an answer that nobody will read"):
            during = await self._client.ask_and_leave(
                sample,
                CANCEL_AFTER_CHUNKS,
                CANCEL_OF_TOKENS,
                lambda: self._blocks(node, lambda blocks: bool(blocks.in_use)),
            )
            for name in self._cluster.metrics:
                await self._blocks(name, lambda blocks: not blocks.in_use)
            after = await self._blocks(node, lambda blocks: not blocks.in_use)
        held = f"the {during.in_use} KV blocks that {node} held are back"
        self._note(f"the client left after {CANCEL_AFTER_CHUNKS} pieces: {held}")
        self._note(f"{after.by_state['free']:,} free + {after.by_state['cached']:,} cached = {after.total:,}")
        if after.total != before.total:
            raise DemoFailed(f"{node} had {before.total} KV blocks and has {after.total}")

    async def _ask(self, name: str, sample: Sample, show: Callable[[str], None] = lambda _: None) -> Reply:
        reply = await self._client.ask(name, sample, show)
        if not sample.check(reply.text):
            raise DemoFailed(f"{name}: the answer is {reply.text!r}, which is not {sample.answer!r}")
        self.replies.append(reply)
        return reply

    async def _blocks(self, node: str, wanted: Callable[[Blocks], bool]) -> Blocks:
        """Poll the node's metrics page until its blocks are as wanted. Raises DemoFailed after BLOCKS_TIMEOUT_S."""
        deadline = time.monotonic() + BLOCKS_TIMEOUT_S
        while not wanted(blocks := await self._cluster.blocks(node)):
            if time.monotonic() > deadline:
                raise DemoFailed(f"{node} still has {blocks.in_use} of {blocks.total} KV blocks in use")
            await asyncio.sleep(BLOCKS_PERIOD_S)
        return blocks

    @asynccontextmanager
    async def _busy(self, text: str) -> AsyncIterator[None]:
        with self._console.status(f"[dim]{text}", spinner="dots"):
            yield

    def _title(self, text: str) -> None:
        self._console.print(f"\n[bold cyan]{text}")

    def _question(self, text: str) -> None:
        self._put(Text.assemble(("> ", "bold"), text, no_wrap=True, overflow="ellipsis"), indent=2)

    def _answer(self, reply: Reply) -> None:
        self._put(Text.assemble(reply.text.strip(), (" ✓", "bold green")), indent=4)

    def _note(self, text: str) -> None:
        self._put(Text(text, style="dim"), indent=4)

    def _put(self, text: Text, indent: int) -> None:
        self._console.print(Padding(text, (0, 0, 0, indent), expand=False))


_CACHED = {"prefill": "cached_tokens", "decode": "decode_cached_tokens"}


def _handover(reply: Reply) -> str:
    megabytes, first_ms = reply.timings["transfer_bytes"] / 1e6, reply.timings["first_token_ms"]
    return f"{megabytes:.2f} MB of KV cache handed over, first token after {first_ms:.0f} ms"
