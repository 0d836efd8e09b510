"""Random faults of nodes, routers and links for a while, under load; what became of every request.

Which fault comes when follows from a seed; how it meets the requests does not. Every answer is compared with that of an
undisturbed run.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.client import Answer, Client
from tests.e2e.cluster import Member, Node, Router
from tests.e2e.link import Link

AT_ONCE = 12
REQUEST_TIMEOUT_S = 60.0
LATE_S = 20.0
"""After its deadline, a request without an end hangs."""
NUM_FAULTS_AT_ONCE = 2
DRAINED, UNFINISHED = 0, 1
"""Exit codes after SIGTERM: a process that was left with requests after --drain-timeout says so."""
STOPPED = "the server was stopped before the request had finished"
GIVEN_UP = "given up, since nodes were lost that ran it"
AWAY, LEFT, IN_FULL = "the router was away", "the client left", "answered in full"
ERRORS = {"node_unavailable", "overloaded", "deadline_exceeded", "cache_exhausted", "transfer_failed", "peer_lost"}
"""Codes with which a request may end when what it needs is away for too long, or failed too often."""


Fault = tuple[str, Callable[[Member], Awaitable[None]]]


@dataclass
class Report:
    """`ends`: of requests by kind; `faults`: by kind and victim. `moved`: answers in full that took several attempts.
    `wrong`, `hung`: what must not be, told."""

    seed: int
    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)

    @property
    def num_answerable(self) -> int:
        """Requests that met a router and whose clients stayed. Clients ask a router that is away again and again."""
        return self.ends.total() - self.ends[AWAY] - self.ends[LEFT]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "ends": dict(self.ends), "faults": dict(self.faults)}


@dataclass(frozen=True)
class Question:
    """`expected`: tokens of each sample."""

    prompt: list[int]
    fields: dict[str, Any]
    expected: dict[int, list[int]]


def make_requests(seed: int, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and fields whose answers are known once seen: greedy or with a seed. Prompts share beginnings."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(3, 500) for _ in range(draw.randint(0, 160))] for _ in range(6)]
    made = []
    for i in range(count):
        prompt = draw.choice(beginnings) + [draw.randrange(3, 500) for _ in range(draw.randint(1, 40))]
        fields: dict[str, Any] = {"max_tokens": draw.choice((2, 10, 40, 120, 200)), "ignore_eos": True}
        if i % 3 == 0:
            fields |= {"temperature": 1.0, "seed": draw.randrange(1000)}
        if i % 10 == 0:
            fields["n"] = draw.randint(2, 3)
        made.append((prompt, fields))
    return made


async def ask_calmly(client: Client, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[Question]:
    """What the answers must be."""
    answers = await asyncio.gather(*(client.complete(prompt, **fields) for prompt, fields in requests))
    questions = []
    for (prompt, fields), answer in zip(requests, answers, strict=True):
        assert answer.done, answer.error
        questions.append(Question(prompt, fields, {**answer.tokens}))
    return questions


class Chaos:
    """`links`: of each node, the path that leads to it. `pause_s`: bounds of the time between the end of one fault and
    the next one, of each of the two that may be there at once. `pace`: how much of their time the faults last. All is
    well again when `run` ends."""

    def __init__(
        self,
        seed: int,
        nodes: Sequence[Node],
        routers: Sequence[Router],
        links: dict[str, Link],
        pause_s: tuple[float, float],
        pace: float,
        report: Report,
    ) -> None:
        self._draw = random.Random(seed)
        self._nodes = nodes
        self._routers = routers
        self._links = links
        self._pause_s = pause_s
        self._pace = pace
        self._report = report
        self._faulty: set[Member] = set()
        self._router_lost: dict[str, float] = {}  # when it was gone, the last time; infinite while it ends

    async def run(self, questions: Sequence[Question], seconds: float) -> None:
        """Faults and requests for so long; then until each request has ended and each process is back."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_FAULTS_AT_ONCE):
                group.create_task(self._break_things(began + seconds))
            for _ in range(AT_ONCE):
                group.create_task(self._keep_asking(questions, began + seconds))
        self._report.seconds = round(time.monotonic() - began, 1)

    # ---- faults ----

    async def _break_things(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(self._draw.uniform(*self._pause_s))
            victims = [m for m in (*self._nodes, *self._nodes, *self._routers) if m not in self._faulty]
            victim = self._draw.choice(victims)
            name, fault = self._draw.choice(self._faults_of(victim))
            self._faulty.add(victim)
            try:
                await fault(victim)
            finally:
                self._faulty.discard(victim)
            kind = "router" if victim in self._routers else "node"
            self._report.faults[f"{kind} {name}"] += 1

    def _faults_of(self, victim: Member) -> list[Fault]:
        always: list[Fault] = [("killed", self._kill), ("stopped and started", self._restart), ("frozen", self._freeze)]
        if victim in self._routers:
            return always
        return [*always, ("link cut", self._cut), ("link stalled", self._stall)]

    async def _kill(self, victim: Member) -> None:
        self._note(victim, math.inf)
        await asyncio.to_thread(victim.kill)
        self._note(victim, time.monotonic())
        await self._last(0.0, 3.0)
        await self._start(victim)

    async def _restart(self, victim: Member) -> None:
        self._note(victim, math.inf)
        code = await asyncio.to_thread(victim.terminate)
        self._note(victim, time.monotonic())
        if code not in (DRAINED, UNFINISHED):
            self._report.wrong.append(f"{victim.name} ended with {code} after SIGTERM")
        await self._start(victim)

    async def _last(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._pace * self._draw.uniform(least_s, most_s))

    async def _start(self, victim: Member) -> None:
        victim.start()
        await asyncio.to_thread(victim.wait_page, "/health")

    async def _freeze(self, victim: Member) -> None:
        victim.freeze()
        try:
            await self._last(0.5, 8.0)
        finally:
            victim.thaw()

    async def _cut(self, victim: Member) -> None:
        link = self._links[victim.name]
        await link.cut()
        await self._last(0.1, 5.0)
        link.heal()

    async def _stall(self, victim: Member) -> None:
        link = self._links[victim.name]
        link.stall()
        await self._last(0.5, 8.0)
        link.heal()

    def _note(self, victim: Member, lost: float) -> None:
        """A request may begin after the signal and still find the socket open."""
        if victim in self._routers:
            self._router_lost[victim.name] = lost

    # ---- requests ----

    async def _keep_asking(self, questions: Sequence[Question], until: float) -> None:
        draw = random.Random(self._draw.random())
        while time.monotonic() < until:
            router, question = draw.choice(self._routers), draw.choice(questions)
            end = await self._ask(router, question, draw)
            self._report.ends[end] += 1
            if end == AWAY:
                await asyncio.sleep(0.2)

    async def _ask(self, router: Router, question: Question, draw: random.Random) -> str:
        """One request to its end, which is returned by kind."""
        began = time.monotonic()
        async with Client(router) as client:
            stream, leaves = draw.random() < 0.7, draw.random() < 0.15
            fields = {**question.fields, "timeout": REQUEST_TIMEOUT_S}
            request = client.begin(question.prompt, stream=stream, **fields)
            try:
                if leaves and not await request.ends_within(draw.uniform(0.0, 1.0)):
                    await request.leave()
                    return LEFT
                answer = await request.end(REQUEST_TIMEOUT_S + LATE_S)
            except httpx.TransportError as error:
                return self._lost_router(router, began, request.answer, question, error)
            except TimeoutError:
                self._report.hung.append(f"{router.name}: {question.fields}")
                return "hung"
        return self._judge(answer, question)

    def _lost_router(
        self, router: Router, began: float, answer: Answer, question: Question, error: httpx.TransportError
    ) -> str:
        """A connection may break only if its router ended meanwhile, and has carried nothing wrong."""
        self._compare(answer, question, whole=False)
        if isinstance(error, httpx.ConnectError) or self._router_lost.get(router.name, 0.0) >= began:
            return AWAY
        self._report.wrong.append(f"{router.name} broke a connection: {error!r}")
        return "broken"

    def _judge(self, answer: Answer, question: Question) -> str:
        if answer.error is None:
            self._compare(answer, question, whole=True)
            if answer.timings and answer.timings["attempts"] > 1:
                self._report.moved += 1
            return IN_FULL
        self._compare(answer, question, whole=False)
        code, text = str(answer.error["code"]), str(answer.error["message"])
        if text.startswith(STOPPED):
            return "its router was stopped"
        if text.startswith(GIVEN_UP):
            return "error two nodes lost that ran it"
        if code not in ERRORS:
            self._report.wrong.append(f"{answer.error}")
        return f"error {code}"

    def _compare(self, answer: Answer, question: Question, *, whole: bool) -> None:
        """Tokens must be the expected ones, or their beginning."""
        for sample, tokens in answer.tokens.items():
            expected = question.expected[sample]
            if tokens != (expected if whole else expected[: len(tokens)]):
                self._report.wrong.append(f"{question.fields} sample {sample}: {tokens} is not {expected}")
        if whole and not (answer.done and set(answer.finishes) == set(question.expected)):
            self._report.wrong.append(f"{question.fields}: no end of a sample: {answer}")
