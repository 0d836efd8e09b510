"""Whatever others say, within what the wire lets through: nothing raises, accounts agree, and nobody else's request
is any different."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton.sampling import SamplingParams
from tests.protocol import hostile
from tests.protocol.fake_model import VOCAB_SIZE
from tests.protocol.hostile import HostileWorld
from tests.protocol.node import Node

PROMPTS = st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=12).map(tuple)
Said = list[tuple[Any, int]]


def some(messages: st.SearchStrategy[Any]) -> st.SearchStrategy[Said]:
    return st.lists(st.tuples(messages, st.integers(0, 10**6)), min_size=2, max_size=6)


class Hostile(RuleBasedStateMachine):
    """Each rule of a stranger is some messages."""

    world: HostileWorld

    @initialize(windows=st.sampled_from([(None, None), (None, None), (None, 6), (5, 5)]))
    def start(self, windows: tuple[int | None, ...]) -> None:
        self.world = HostileWorld(windows)
        self.world.get_in()

    @precondition(lambda self: len(self.world.clients) < 4)
    @rule(prompt=PROMPTS, n=st.integers(1, 2), seed=st.integers(0, 3))
    def submit(self, prompt: tuple[int, ...], n: int, seed: int) -> None:
        self.world.submit(prompt, n, SamplingParams(seed=seed, max_tokens=5))

    @rule(to_prefill=st.booleans(), said=some(hostile.from_router))
    def router_says(self, to_prefill: bool, said: Said) -> None:
        self._say(self.world.prefill if to_prefill else self.world.decode, said)

    @rule(said=some(hostile.from_prefill))
    def prefill_node_says(self, said: Said) -> None:
        self._say(self.world.decode, said)

    @rule(to_prefill=st.booleans(), said=some(hostile.from_decode))
    def decode_node_says(self, to_prefill: bool, said: Said) -> None:
        self._say(self.world.prefill if to_prefill else self.world.decode, said)

    def _say(self, node: Node, said: Said) -> None:
        for message, pick in said:
            self.world.say(node, message, pick)

    @precondition(lambda self: self.world.grants)
    @rule(pick=st.integers(0, 10**6))
    def prefill_node_sends(self, pick: int) -> None:
        leases = list(self.world.grants)
        self.world.send_parts(leases[pick % len(leases)])

    @rule(picks=st.lists(st.integers(0, 10**6), min_size=8, max_size=20))
    def go_on(self, picks: list[int]) -> None:
        for pick in picks:
            if acts := self.world.enabled():
                self.world.act(acts[pick % len(acts)])

    @rule()
    def wait(self) -> None:
        self.world.advance(0.01)

    def teardown(self) -> None:
        world = self.world
        world.go_away()
        world.run_dry(max_rounds=600)
        world.check_whole()
        for client in world.clients.values():
            assert client.end
            assert client.end.error is None
            assert client.end.timings.num_attempts == 1
            assert client.got == client.want


class EveryHostile(Hostile):
    """All runs."""


TestHostile = Hostile.TestCase
TestHostile.settings = settings(
    max_examples=28,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
TestEveryHostile = pytest.mark.full(pytest.mark.timeout(600)(EveryHostile.TestCase))
TestEveryHostile.settings = settings(TestHostile.settings, max_examples=70)
