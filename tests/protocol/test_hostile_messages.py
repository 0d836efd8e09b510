"""Whatever others say, within what the wire lets through: nothing raises, no books are wrong, and nobody else's request
is any different."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton import wire
from baton.sampling import SamplingParams
from tests.protocol import hostile
from tests.protocol.fake_model import VOCAB_SIZE
from tests.protocol.hostile import EVIL_DECODE, HostileWorld

PROMPTS = st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=12).map(tuple)
MESSAGES_PER_RULE = 3


class Hostile(RuleBasedStateMachine):
    """Each rule of a stranger is MESSAGES_PER_RULE messages."""

    world: HostileWorld

    @initialize()
    def start(self) -> None:
        self.world = HostileWorld()

    @precondition(lambda self: len(self.world.clients) < 4)
    @rule(prompt=PROMPTS, n=st.integers(1, 2), seed=st.integers(0, 3))
    def submit(self, prompt: tuple[int, ...], n: int, seed: int) -> None:
        self.world.submit(prompt, n, SamplingParams(seed=seed, max_tokens=5))

    @rule(data=st.data())
    def router_says(self, data: st.DataObject) -> None:
        world, decode = self.world, self.world.decode.incarnation
        for _ in range(MESSAGES_PER_RULE):
            node = data.draw(st.sampled_from([world.prefill, world.decode]))
            prompts = hostile.prefill(node.incarnation, [decode, EVIL_DECODE])
            world.say(node, data.draw(st.one_of(prompts, prompts, hostile.abort)))

    @rule(data=st.data())
    def prefill_node_says(self, data: st.DataObject) -> None:
        world = self.world
        for _ in range(MESSAGES_PER_RULE):
            granted = data.draw(st.sampled_from(list(world.grants.values()) or [None]))
            num_tokens = world.num_tokens.get(granted.work.key, 3) if granted else 3
            reserve, commit = hostile.reserve(world.decode.incarnation), hostile.commit(granted, num_tokens)
            said = data.draw(st.one_of(reserve, reserve, commit, commit, hostile.release))
            if said.HasField("reserve"):
                world.num_tokens[said.reserve.work.router_epoch, said.reserve.work.request_id] = said.reserve.num_tokens
            world.say(world.decode, said)

    @precondition(lambda self: self.world.grants)
    @rule(data=st.data())
    def prefill_node_sends(self, data: st.DataObject) -> None:
        self.world.send_parts(data.draw(st.sampled_from(list(self.world.grants))))

    @rule(data=st.data())
    def decode_node_says(self, data: st.DataObject) -> None:
        world = self.world
        for _ in range(MESSAGES_PER_RULE):
            victims = [work for client in world.clients.values() for work in client.life.works]
            works = [wire.write_work(work) for work in [*world.reserved[-3:], *victims]]
            said = hostile.from_decode(works or [wire.write_work(hostile.UNKNOWN)], list(range(1, 9)))
            world.say(world.prefill, data.draw(said))

    @rule(picks=st.lists(st.integers(0, 10**6), min_size=4, max_size=12))
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
        world.run_dry()
        world.check_whole()
        for client in world.clients.values():
            assert client.end
            assert client.end.error is None
            assert client.end.timings.num_attempts == 1
            assert client.got == client.want


TestHostile = Hostile.TestCase
TestHostile.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
