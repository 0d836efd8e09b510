"""The raced cluster of `world` at work for a day of its own clock, without a recount after each act, and its account
of all that could grow."""

from __future__ import annotations

import dataclasses
import random
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from engine.step import Choice, Chunk
from tests.protocol.fake_model import NUM_LAYERS, FakeModel, choose
from tests.protocol.leftovers import walk
from tests.protocol.node import Node
from tests.protocol.world import World

ROUND_S = 0.01


class QuickModel(FakeModel):
    """The same tokens, without KV."""

    def _compute(self, layer: int, chunk: Chunk, tokens: list[int], table: list[int]) -> list[Choice]:
        sequence = chunk.sequence
        if chunk.end > len(tokens):
            tokens.append(self._last_tokens[sequence, chunk.end - 1])
        if not chunk.samples_token or layer < NUM_LAYERS - 1:
            return []
        choices = choose(tokens, chunk)
        self._last_tokens[sequence, chunk.end] = choices[-1].token
        while len(self._last_tokens) > 1000:  # no more are in flight
            del self._last_tokens[next(iter(self._last_tokens))]
        return choices


@dataclass(frozen=True, slots=True)
class Reading:
    """At rest. `sizes`: elements of each container of the router and of the nodes that live on, by its path. `turn_s`:
    the median since the last reading."""

    num_requests: int
    resident_bytes: int
    num_descriptors: int
    num_threads: int
    turn_s: float
    sizes: dict[str, int]


class Soak(World):
    """Requests of all kinds in groups: with several samples, stop strings, clients that leave, deadlines too short, and
    now and then a stream that breaks or a node that dies. The first node of each role lives on: what a node holds
    depends on its age."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._turns: list[float] = []
        self.num_requests = 0
        super().__init__(num_prefill=2, num_decode=2, num_blocks=60, num_slots=4)
        self._lasting = {incarnation for incarnation, node in self.nodes.items() if node.name.endswith("-0")}
        self.rest()

    def run(self, num_requests: int) -> Reading:
        """So many more, and what there is afterwards."""
        end = self.num_requests + num_requests
        while self.num_requests < end:
            for _ in range(20):
                self._submit_one()
            self._disturb()
            self.rest()
            self.advance(self._draw.choice([0.0, 0.2, 1.0]))
        self.advance(200.0)  # the longest deadline is 60 s
        self.rest()
        return self._read()

    def rest(self) -> None:
        """Until every request has ended, and nothing is under way."""
        for _ in range(2000):
            self._round()
            busy = self.clients or self.hub.pending or self._streams.busy()
            if not busy and all(node.idle for node in self.nodes.values()):
                return
        raise AssertionError(f"still at it: {list(self.clients)}")

    # ---- of World, without its checks ----

    def _start_node(self, name: str, role: NodeRole) -> None:
        incarnation = f"{name}.{next(self._serials)}"
        node = Node(name, role, incarnation, self.hub, self._clock, *self._sizes, make_model=QuickModel)
        self.nodes[incarnation] = node
        self._sessions.open(node)

    def settle(self) -> None:
        self._collect_router()
        for incarnation in list(self.nodes):
            self._collect(incarnation)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.router.tick(self.now)
        self.settle()

    # ---- what happens ----

    def _submit_one(self) -> None:
        draw = self._draw
        prompt = tuple(draw.randrange(2, 97) for _ in range(draw.randint(1, 12)))
        sampling = SamplingParams(seed=draw.randrange(9), max_tokens=draw.choice([1, 2, 3, 6]), ignore_eos=True)
        sampling = dataclasses.replace(sampling, num_prompt_logprobs=draw.choice([None, 0]))
        deadline_s = draw.choice([0.05, 60.0, 60.0, 60.0, 60.0])
        request_id = self.submit(prompt, draw.choice([1, 1, 1, 2]), sampling, deadline_s)
        self.num_requests += 1
        if request_id in self.clients:
            kind = draw.random()
            for _ in range(draw.randrange(3)):
                self._round()
            if kind < 0.1:
                self.router.cancel(request_id, self.now)
            elif kind < 0.3 and request_id in self.clients:
                self.act(("stop", (request_id, 0)))

    def _disturb(self) -> None:
        kind, draw = self._draw.random(), self._draw
        if kind < 0.02:
            self._crash(draw.choice([incarnation for incarnation in self.nodes if incarnation not in self._lasting]))
        elif kind < 0.04 and self._links.up:
            self._links.break_off(*draw.choice(sorted(self._links.up)), "stream broke")
        elif kind < 0.06 and (nodes := [node for node in self.nodes.values() if node.subscribed]):
            self._sessions.break_off(draw.choice(nodes))

    def _round(self) -> None:
        """All that is on its way arrives, and each node has a turn."""
        for stream in self._streams.busy():
            while self._streams.queues.get(stream):
                self._streams.deliver(*stream)
        self.settle()
        while self.hub.pending:
            self.hub.deliver(0)
        for incarnation, node in list(self.nodes.items()):
            while node.model.is_busy:
                node.advance_device()
            if node.has_turn():
                began = time.thread_time()
                self._turn(incarnation)
                self._turns.append(time.thread_time() - began)
        self.advance(ROUND_S)
        for request_id in [request_id for request_id, client in self.clients.items() if client.end]:
            del self.clients[request_id]

    # ---- the account ----

    def _read(self) -> Reading:
        for node in self.nodes.values():
            node.check_integrity()
            node.check_whole()
            node.fenced.clear()  # a note of this test's own
        turns, self._turns = self._turns, []
        sizes = dict(walk(self.router, "router"))
        for incarnation in self._lasting:
            sizes |= dict(walk(self.nodes[incarnation].core, self.nodes[incarnation].name))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return Reading(
            self.num_requests, pages * 4096, num_descriptors, threading.active_count(), statistics.median(turns), sizes
        )
