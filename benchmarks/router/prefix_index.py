"""The router's prefix index, and what publishing costs a node: `python -m benchmarks.router.prefix_index`.

Every prompt is held by one prefill and one decode node, in prompts of 512 blocks. Looked up are prompts that are spread
over the whole index, so that little of them is in the CPU's caches, and one that all nodes hold. Before anything is
timed, answers are checked. Times are those of the thread, without what other processes take from it.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import ClassVar

from pydantic import Field

from baton import wire
from baton.block_hash import HASH_BYTES, BlockHash, chain
from baton.messages import KvEvents
from baton.settings import Settings, parse
from baton.v1 import node_pb2
from baton.wire.limits import MAX_KV_EVENTS
from benchmarks.harness.tables import Table
from engine.block_manager import BlockManager
from router.placement.prefix_index import PrefixIndex

PROMPT_BLOCKS = 512
BLOCK_SIZE = 16
STEP_BLOCKS = 16
"""Sealed in a step of 256 sequences: each fills a block every 16 steps."""


class IndexSettings(Settings):
    """Measures the router's prefix index: memory, lookups, events; and what a node pays to record them."""

    prog: ClassVar[str] = "benchmarks.router.prefix_index"

    num_blocks: int = Field(1_000_000, ge=100_000, description="different blocks in the index")
    num_nodes: int = Field(128, ge=2, description="half of them prefill nodes")
    num_lookups: int = Field(400, ge=10, description="lookups to time, of each kind")


class Published:
    """An index with its nodes, and what each prompt's blocks are."""

    def __init__(self, settings: IndexSettings) -> None:
        self.index = PrefixIndex()
        self.prompts: list[bytes] = []
        self.apply_s = 0.0
        self._half = settings.num_nodes // 2
        self._next = [0] * settings.num_nodes
        for number in range(settings.num_nodes):
            self.index.add(str(number), settings.num_blocks)

    def publish(self, number: int, hashes: Sequence[BlockHash]) -> None:
        sequence = self._next[number]
        self._next[number] += 1
        events = KvEvents(sequence, tuple(hashes), snapshot=sequence == 0)
        began = time.thread_time()
        self.index.apply(str(number), events)
        self.apply_s += time.thread_time() - began

    def fill(self, num_blocks: int) -> None:
        for prompt in range(num_blocks // PROMPT_BLOCKS):
            joined = os.urandom(HASH_BYTES * PROMPT_BLOCKS)
            for number in self.nodes_of(prompt):
                self.publish(number, split(joined))
            self.prompts.append(joined)

    def nodes_of(self, prompt: int) -> tuple[int, int]:
        return prompt % self._half, self._half + prompt // 3 % self._half


def split(joined: bytes) -> list[BlockHash]:
    """Fresh objects, as of a message or a request."""
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def check(published: Published) -> None:
    """Raises ValueError for an answer that is wrong."""
    for prompt, joined in enumerate(published.prompts[:50]):
        expected = dict.fromkeys(map(str, published.nodes_of(prompt)), PROMPT_BLOCKS)
        if (found := published.index.held(split(joined))) != expected:
            raise ValueError(f"prompt {prompt} is held by {found}, not {expected}")
        if published.index.held([*split(joined)[:7], b"x" * HASH_BYTES]) != dict.fromkeys(expected, 7):
            raise ValueError("blocks after a hole count")


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(prepare: Callable[[], list[BlockHash]], run: Callable[[list[BlockHash]], object], times: int) -> list[float]:
    """Microseconds of each run."""
    taken = []
    for _ in range(times):
        hashes = prepare()
        began = time.thread_time()
        run(hashes)
        taken.append((time.thread_time() - began) * 1e6)
    return taken


def lookups(published: Published, settings: IndexSettings) -> dict[str, list[float]]:
    """Microseconds of the lookups of each kind."""
    draw, index, times = Random(0), published.index, settings.num_lookups
    everywhere, stairs = (os.urandom(HASH_BYTES * PROMPT_BLOCKS) for _ in range(2))
    for number in range(settings.num_nodes):
        published.publish(number, split(everywhere))
        published.publish(number, split(stairs)[: PROMPT_BLOCKS * (number + 1) // settings.num_nodes])
    generated = [os.urandom(HASH_BYTES * PROMPT_BLOCKS) for _ in range(64)]
    for block in range(PROMPT_BLOCKS):
        of_step = [joined[HASH_BYTES * block : HASH_BYTES * (block + 1)] for joined in generated]
        published.publish(settings.num_nodes - 1, of_step)
    short = HASH_BYTES * 64
    return {
        "512 blocks, 2 nodes hold them": timed(lambda: split(draw.choice(published.prompts)), index.held, times),
        "64 blocks, 2 nodes hold them": timed(lambda: split(draw.choice(published.prompts)[:short]), index.held, times),
        "512 blocks, all nodes hold them": timed(lambda: split(everywhere), index.held, times),
        "512 blocks, each node holds some more": timed(lambda: split(stairs), index.held, times),
        "512 blocks, generated in one batch with others": timed(
            lambda: split(draw.choice(generated)), index.held, times
        ),
        "512 blocks, no node holds them": timed(
            lambda: split(os.urandom(HASH_BYTES * PROMPT_BLOCKS)), index.held, times
        ),
    }


def seal_us(records: bool, times: int) -> float:
    """Microseconds per step of sealing blocks and reporting that, at the median."""
    blocks = BlockManager(times * STEP_BLOCKS + 2)
    blocks.record_changes(records)
    table = iter(blocks.allocate(times * STEP_BLOCKS).blocks)

    def step(hashes: list[BlockHash]) -> None:
        blocks.seal([next(table) for _ in hashes], hashes)
        blocks.take_changes()

    return statistics.median(timed(lambda: split(os.urandom(HASH_BYTES * STEP_BLOCKS)), step, times))


def others(settings: IndexSettings) -> dict[str, float]:
    """Microseconds of what else the index costs a router and a node."""
    tokens = tuple(range(PROMPT_BLOCKS * BLOCK_SIZE))
    hashed = timed(list, lambda _: chain(tokens, BLOCK_SIZE), settings.num_lookups)
    events = KvEvents(1, tuple(split(os.urandom(HASH_BYTES * MAX_KV_EVENTS))))
    message = wire.write_node_message(events).SerializeToString()
    read = timed(list, lambda _: wire.read_node_message(node_pb2.NodeMessage.FromString(message)), settings.num_lookups)
    return {
        f"hashing a prompt of {len(tokens)} tokens": statistics.median(hashed),
        f"reading a message of {MAX_KV_EVENTS} blocks": statistics.median(read),
        "a node's step that seals 16 blocks": seal_us(False, settings.num_lookups),
        "the same, recorded": seal_us(True, settings.num_lookups),
    }


def main(argv: Sequence[str] | None = None) -> None:
    settings = parse(IndexSettings, sys.argv[1:] if argv is None else argv)
    published = Published(settings)
    before = resident_bytes()
    published.fill(settings.num_blocks)
    num_pairs = 2 * len(published.index)
    apply_us = published.apply_s / num_pairs * 1e6
    num_bytes = resident_bytes() - before - sum(map(len, published.prompts))
    check(published)
    looked_up = lookups(published, settings)
    began = time.thread_time()
    published.index.forget("0")
    forget_ms = (time.thread_time() - began) * 1e3
    rows = [
        (name, f"{statistics.median(us):.0f}", f"{min(us):.0f}", f"{max(us):.0f}") for name, us in looked_up.items()
    ]
    print(Table(["lookup", "median us", "least", "most"], rows).plain())
    print(Table(["other work", "median us"], [(name, f"{us:.1f}") for name, us in others(settings).items()]).plain())
    result = {
        "num_blocks": len(published.index),
        "num_nodes": settings.num_nodes,
        "mb_per_million_blocks": round(num_bytes / len(published.index), 1),
        "events_per_s": round(1e6 / apply_us),
        "forget_ms": round(forget_ms, 1),
        "lookup_us": {name: round(statistics.median(us), 1) for name, us in looked_up.items()},
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
