"""Many requests at once of every kind, of which some are given up and some meet a dying node: what became of each.

The plan (what is asked, who leaves when, which node dies after how many requests) follows from a seed alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

from baton.v1 import generation_pb2 as pb
from baton.wire import pack_tokens
from tests.e2e.client import Answer, Client
from tests.e2e.cluster import PATIENCE_S, Node, Router

AT_ONCE = 24
FROZEN_S = 7.0
"""Longer than the silence after which a node is given up."""
REFUSALS = {"node_unavailable", "overloaded", "deadline_exceeded", "cache_exhausted"}

Way = Literal["stay", "leave at a token", "leave at a time", "cancel a call", "call"]
WAYS: Sequence[Way] = ("stay", "leave at a token", "leave at a time", "cancel a call", "call")


@dataclass(frozen=True)
class Wish:
    """One request, and how its client behaves: it leaves after `patience` tokens or seconds, or stays."""

    way: Way
    prompt: list[int]
    fields: dict[str, Any]
    stream: bool
    patience: float

    @property
    def num_samples(self) -> int:
        return int(self.fields.get("n", 1))


@dataclass
class Tally:
    """Ends by kind, as clients saw them."""

    ends: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)  # of nodes

    @property
    def num_stayed(self) -> int:
        return self.ends.total() - self.ends["left"]


def make_wishes(seed: int, count: int) -> list[Wish]:
    """Prompts share beginnings, so that prefix caches are at work; a twelfth has several samples."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, 500) for _ in range(draw.randint(0, 160))] for _ in range(6)]
    return [_make_wish(draw, beginnings) for _ in range(count)]


def _make_wish(draw: random.Random, beginnings: Sequence[list[int]]) -> Wish:
    way = draw.choices(WAYS, (55, 15, 15, 8, 7))[0]
    prompt = draw.choice(beginnings) + [draw.randrange(3, 500) for _ in range(draw.randint(1, 40))]
    fields: dict[str, Any] = {"max_tokens": draw.choice((1, 2, 5, 10, 20, 40)), "ignore_eos": True}
    if draw.random() < 0.3:
        fields |= {"temperature": 1.0, "seed": draw.randrange(1000)}
    if draw.random() < 1 / 12:
        fields["n"] = draw.randint(2, 3)
    if draw.random() < 0.15:
        fields["stop"] = [draw.choice("aeint ")]  # ends most answers early, in the router
    if draw.random() < 0.05:
        fields["cache_salt"] = str(draw.random())
    timed = "timeout" if way in ("stay", "leave at a token", "leave at a time") else "timeout_s"
    if draw.random() < 0.06:
        fields[timed] = draw.uniform(0.01, 0.4)
    patience = draw.randint(1, 15) if way in ("leave at a token", "cancel a call") else draw.uniform(0.0, 0.5)
    return Wish(way, prompt, fields, way == "leave at a token" or draw.random() < 0.6, patience)


class Storm:
    """`kills`: after so many requests, which node dies, and comes back; `freezes`: which hangs for a while."""

    def __init__(
        self, client: Client, router: Router, nodes: Sequence[Node], kills: dict[int, Node], freezes: dict[int, Node]
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._router = router
        self._nodes = nodes
        self._kills = kills
        self._freezes = freezes
        self._one_at_a_time = asyncio.Lock()

    async def run(self, wishes: Sequence[Wish], *, revive: bool) -> None:
        """All wishes, AT_ONCE at a time, to the end of each. With `revive` killed nodes are started again at once, and
        all nodes are back when this ends."""
        queue = list(enumerate(wishes))[::-1]
        async with asyncio.TaskGroup() as group:

            async def attempt_id() -> None:
                while queue:
                    number, wish = queue.pop()
                    if number in self._kills:
                        group.create_task(self._kill(self._kills.pop(number), revive))
                    if number in self._freezes:
                        group.create_task(self._freeze(self._freezes.pop(number)))
                    self.tally.ends[await self._grant(wish)] += 1

            for _ in range(AT_ONCE):
                group.create_task(attempt_id())
        if revive:
            await self._wait_nodes()

    # ---- the nodes ----

    async def _kill(self, node: Node, revive: bool) -> None:
        async with self._one_at_a_time:
            await self._wait_nodes()
            await asyncio.to_thread(node.kill)
            self.tally.losses["killed"] += 1
            if revive:
                node.start()
                await asyncio.to_thread(node.wait_ready)

    async def _freeze(self, node: Node) -> None:
        async with self._one_at_a_time:
            await self._wait_nodes()
            node.freeze()
            try:
                await asyncio.sleep(FROZEN_S)
            finally:
                node.thaw()
            self.tally.losses["frozen"] += 1

    async def _wait_nodes(self) -> None:
        """Until all are in use, so that one of each role is left when the next one goes."""
        counts = Counter(node.role for node in self._nodes)
        await asyncio.to_thread(self._router.wait_nodes, counts["prefill"], counts["decode"])

    # ---- the clients ----

    async def _grant(self, wish: Wish) -> str:
        """Its end: "finished", "left", or the error's code."""
        match wish.way:
            case "call":
                return await self._call(wish)
            case "cancel a call":
                return await self._cancel(wish)
        request = self._client.begin(wish.prompt, stream=wish.stream, **wish.fields)
        if wish.way == "leave at a token":
            await request.reaches(int(wish.patience))
        elif wish.way == "leave at a time":
            await request.ends_within(wish.patience)
        if wish.way != "stay" and not request.ended:
            await request.leave()
            return "left"
        return check(wish, await request.end())

    async def _call(self, wish: Wish) -> str:
        try:
            return check(wish, await self._client.generate(wish.prompt, **wish.fields))
        except grpc.aio.AioRpcError as error:
            return error.code().name.lower()

    async def _cancel(self, wish: Wish) -> str:
        request = pb.GenerateRequest(prompt_tokens=pb.TokenIds(ids=pack_tokens(wish.prompt)), **wish.fields)
        call = self._client.generation.Generate(request, timeout=PATIENCE_S)
        try:
            for _ in range(int(wish.patience)):
                if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]
                    break
        except grpc.aio.AioRpcError:
            pass
        if not call.done():
            call.cancel()
            return "left"
        code = await call.code()
        return "finished" if code is grpc.StatusCode.OK else code.name.lower()


def check(wish: Wish, answer: Answer) -> str:
    """One end, and a right one: every sample in full, or one error."""
    if answer.error:
        code = str(answer.error["code"])
        assert code in REFUSALS, answer.error
        return code
    assert answer.status == 200
    assert answer.done
    assert set(answer.finishes) == set(range(wish.num_samples)), "a sample has no end"
    lengths = {sample: len(tokens) for sample, tokens in answer.tokens.items()}
    if "stop" not in wish.fields:
        assert set(lengths.values()) == {wish.fields["max_tokens"]}, lengths
    assert answer.usage["completion_tokens"] == sum(lengths.values())
    return "finished"
