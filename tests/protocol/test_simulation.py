"""The protocol's state machines, raced: any order between streams, repeats, broken streams, crashes, aborts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import decode_node.leases
from baton.layout import KvSlice
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from router.requests.request_state import FirstToken
from tests.machines import machine
from tests.protocol.fake_model import VOCAB_SIZE
from tests.protocol.network import ROUTER
from tests.protocol.world import World

FIRST_TOKEN = get_args(FirstToken)
WINDOWS = [(None, 6), (9, 9), (11, 5), (None, 1, None, 1), (None, None, 7, 7, 7)]
"""Of layers: in two groups, one, two, two with two layers each, and three of which one has a layer less."""
Ranks = Mapping[NodeRole, tuple[KvSlice, ...]]
PROMPTS = st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=24).map(tuple)


class Protocol(RuleBasedStateMachine):
    """Hypothesis chooses what happens next; the world checks after each act."""

    world: World

    @initialize(first_token=st.sampled_from(FIRST_TOKEN))
    def start(self, first_token: FirstToken) -> None:
        self.world = World(num_blocks=26, first_token=first_token)

    @rule(prompt=PROMPTS, n=st.integers(1, 3), max_tokens=st.integers(1, 12), seed=st.integers(0, 3))
    def submit(self, prompt: tuple[int, ...], n: int, max_tokens: int, seed: int) -> None:
        self.world.submit(prompt, n, SamplingParams(seed=seed, max_tokens=max_tokens))

    @rule(data=st.data(), times=st.integers(1, 8))
    def go_on(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            if acts := self.world.enabled():
                self.world.act(data.draw(st.sampled_from(acts)))

    @precondition(lambda self: self.world.live())
    @rule(data=st.data())
    def go_wrong(self, data: st.DataObject) -> None:
        self.world.act(data.draw(st.sampled_from(self.world.faults())))

    @rule(seconds=st.sampled_from([0.01, 1.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    def teardown(self) -> None:
        self.world.run_dry()
        self.world.check_whole()


class EveryProtocol(Protocol):
    """All runs."""


TestProtocol = Protocol.TestCase
TestProtocol.settings = machine(max_examples=20, steps=40)
TestEveryProtocol = pytest.mark.full(pytest.mark.timeout(600)(EveryProtocol.TestCase))
TestEveryProtocol.settings = machine(max_examples=60, steps=40)


def race(
    seed: int,
    faults: float,
    num_blocks: int,
    ranks: Ranks | None = None,
    windows: tuple[int | None, ...] = (None, None),
) -> World:
    """One long random run; `faults` is the chance that a step is something going wrong. In every other pair of seeds,
    prompts of a few blocks are handled as long ones."""
    with pytest.MonkeyPatch.context() as patched:
        if seed % 4 > 1:
            patched.setattr(decode_node.leases, "LONG_BLOCKS", 3)
        return _race(random.Random(seed), FIRST_TOKEN[seed % 2], faults, num_blocks, ranks or {}, windows)


def _race(
    draw: random.Random,
    first_token: FirstToken,
    faults: float,
    num_blocks: int,
    ranks: Ranks,
    windows: tuple[int | None, ...],
) -> World:
    num_slots = draw.choice([1, 2, 4])
    sizes = num_blocks, num_slots, first_token, ranks, windows
    world = World(2, 2, *sizes)
    for _ in range(400):
        if draw.random() < 0.04:
            prompt = tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randint(1, 40)))
            if draw.random() < 0.5 and world.clients:  # a prefix that somebody has sent before
                old = draw.choice(list(world.clients.values())).request.prompt_tokens
                prompt = (old + prompt)[:40]
            sampling = SamplingParams(
                seed=draw.randrange(9),
                max_tokens=draw.randint(1, 20),
                ignore_eos=draw.random() < 0.3,
                num_prompt_logprobs=draw.choice([None, None, 0]),
            )
            world.submit(prompt, draw.choice([1, 1, 1, 2, 4]), sampling, draw.choice([0.5, 1e6, 1e6]))
        world.act_at_random(draw, faults)
    world.run_dry()
    world.check_whole()
    return world


def seeds(in_ci: range, in_full: range) -> list[Any]:
    """Four in a row race differently: see `race`."""
    return [*in_ci, *(pytest.param(seed, marks=pytest.mark.full) for seed in in_full)]


@pytest.mark.parametrize("seed", seeds(range(8), range(8, 12)))
def test_without_faults_every_answer_is_whole(seed: int) -> None:
    world = race(seed, faults=0.0, num_blocks=26)
    for client in world.clients.values():
        assert client.end
        if client.request.deadline_s > 1:
            assert client.end.error is None
            assert client.end.timings.num_attempts == 1
            assert client.got == client.want


@pytest.mark.parametrize("seed", seeds(range(100, 112), range(112, 116)))
def test_with_faults_nothing_is_lost(seed: int) -> None:
    race(seed, faults=0.08, num_blocks=26)


@pytest.mark.parametrize("seed", seeds(range(22, 25, 2), range(25, 60)))
def test_nodes_that_stop_one_after_the_other_lose_nothing_that_they_have_taken(seed: int) -> None:
    """An upgrade: one node at a time is told to stop, and leaves after its work, and another takes its place. Only what
    waits for it, or is on its way to it, is tried again elsewhere."""
    world, draw = World(num_blocks=60), random.Random(seed)
    world.run_dry()  # until the router knows its nodes
    to_upgrade = [*world.nodes]
    for number in range(400):
        if number < 200 and draw.random() < 0.06:
            prompt = tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randint(1, 30)))
            world.submit(prompt, draw.choice([1, 1, 2]), SamplingParams(seed=number, max_tokens=draw.randint(2, 24)))
        all_there = not world.stopping and all(node.subscribed for node in world.nodes.values())
        if number > 60 and to_upgrade and all_there and draw.random() < 0.1:
            world.act(("tell_to_stop", to_upgrade.pop(draw.randrange(len(to_upgrade)))))
        if acts := world.enabled():
            world.act(draw.choice(acts))
    world.run_dry()
    world.check_whole()
    for client in world.clients.values():
        assert client.end
        assert client.end.error is None
        assert client.got == client.want
        failed = [attempt for attempt in client.state.record.attempts if attempt.error]
        assert {attempt.state for attempt in failed} <= {"queued", "prefilling"}


BY_HEADS = (KvSlice(0, 2, 0, 1), KvSlice(0, 2, 1, 2))
BY_LAYERS = (KvSlice(0, 1, 0, 2), KvSlice(1, 2, 0, 2))
BY_BOTH = tuple(KvSlice(layer, layer + 1, head, head + 1) for layer in range(2) for head in range(2))
DIVISIONS = {
    "one": (),
    "heads": BY_HEADS,
    "layers": BY_LAYERS,
    "heads, each twice": BY_HEADS * 2,
    "both": BY_BOTH,
}


DIVIDED = [
    ("heads", "one"),
    ("one", "heads"),
    ("heads", "heads"),
    ("layers", "one"),
    ("one", "layers"),
    ("heads", "layers"),
    ("heads, each twice", "one"),
    ("one", "heads, each twice"),
    ("heads, each twice", "both"),
    ("both", "heads"),
]
ONCE = {
    *(("one", "heads"), ("heads", "layers"), ("layers", "one")),
    *(("heads, each twice", "both"), ("both", "heads"), ("one", "heads, each twice")),
}
"""Each division, on either side."""


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [pytest.param(*pair, marks=[] if pair in ONCE else pytest.mark.full) for pair in DIVIDED],
)
def test_nodes_whose_ranks_hold_other_parts_of_the_model_hand_over_to_one_another(prefill: str, decode: str) -> None:
    """`FakeModel` compares all that D's ranks hold of a request before it computes its next token."""
    ranks = {NodeRole.PREFILL: DIVISIONS[prefill], NodeRole.DECODE: DIVISIONS[decode]}
    whole = race(1, faults=0.0, num_blocks=26, ranks=ranks)
    handed_over = [client for client in whole.clients.values() if client.end and client.end.timings.transfer_bytes]
    assert len(handed_over) > 3
    assert all(client.got == client.want for client in handed_over if client.end and client.end.error is None)


@pytest.mark.parametrize(("prefill", "decode"), DIVIDED[::3])
def test_divided_models_lose_nothing_with_faults(prefill: str, decode: str) -> None:
    ranks = {NodeRole.PREFILL: DIVISIONS[prefill], NodeRole.DECODE: DIVISIONS[decode]}
    race(2, faults=0.08, num_blocks=26, ranks=ranks)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 23))
@pytest.mark.parametrize(("prefill", "decode"), DIVIDED)
def test_many_more_between_divided_models(prefill: str, decode: str, seed: int) -> None:
    ranks = {NodeRole.PREFILL: DIVISIONS[prefill], NodeRole.DECODE: DIVISIONS[decode]}
    race(seed, faults=0.08, num_blocks=26, ranks=ranks)


@pytest.mark.parametrize(
    ("windows", "faults"),
    [
        pytest.param(windows, faults, marks=[] if faults == 0.08 or index in (0, 4) else pytest.mark.full)
        for index, windows in enumerate(WINDOWS)
        for faults in (0.0, 0.08)
    ],
)
def test_layers_with_windows_are_sent_what_will_be_read(windows: tuple[int | None, ...], faults: float) -> None:
    """`FakeModel` compares what attention sees, in each layer."""
    world = race(5, faults, num_blocks=30 + 16 * len(set(windows)), windows=windows)
    handed_over = [client for client in world.clients.values() if client.end and client.end.timings.transfer_bytes]
    assert handed_over
    if not faults:
        assert all(c.got == c.want for c in world.clients.values() if c.request.deadline_s > 1)


@pytest.mark.parametrize("windows", WINDOWS[:3])
def test_nothing_else_is_sent(windows: tuple[int | None, ...]) -> None:
    """Of 38 tokens: what the next one reads, in blocks."""
    world, draw = World(1, 1, num_blocks=60, windows=windows), random.Random(0)
    world.run_dry()  # until the router knows its nodes
    client = world.clients[world.submit(tuple(range(2, 40)), 1, SamplingParams(seed=3, max_tokens=6, ignore_eos=True))]
    while world.live():
        world.act(draw.choice(world.enabled()))
    world.run_dry()
    world.check_whole()
    model = next(iter(world.nodes.values())).model
    assert client.end
    assert client.got == client.want
    assert client.end.timings.transfer_bytes == model.shape.num_held(38) * model.layout.block_bytes


IN_STAGES = (KvSlice(0, 1, 0, 2), KvSlice(1, 3, 0, 2), KvSlice(3, 5, 0, 2))


@pytest.mark.parametrize(
    ("windows", "ranks"),
    [
        ((None, 6), {NodeRole.PREFILL: BY_HEADS}),
        ((None, 6), {NodeRole.DECODE: BY_HEADS * 2}),
        ((None, 6), {NodeRole.PREFILL: BY_LAYERS}),  # each with the layers of one group alone
        ((None, None, 7, 7, 7), {NodeRole.PREFILL: IN_STAGES}),  # the first without layers of two groups
    ],
)
def test_ranks_hand_over_blocks_of_every_group(windows: tuple[int | None, ...], ranks: Ranks) -> None:
    world = race(1, faults=0.0, num_blocks=50, ranks=ranks, windows=windows)
    ended = [client for client in world.clients.values() if client.end]
    handed_over = [client for client in ended if client.end.timings.transfer_bytes]
    assert len(handed_over) > 3
    assert all(client.got == client.want for client in handed_over if client.end and client.end.error is None)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200))
def test_many_more_with_windows(seed: int) -> None:
    windows = WINDOWS[seed % len(WINDOWS)]
    race(seed, faults=0.02 * (seed % 5), num_blocks=22 + 16 * len(set(windows)) + seed % 20, windows=windows)


@pytest.mark.full
@pytest.mark.parametrize("seed", [*range(116, 124), *range(1000, 1400)])
def test_many_more(seed: int) -> None:
    race(seed, faults=0.05 + (seed % 5) * 0.05, num_blocks=18 + seed % 30)


@pytest.mark.parametrize("num_damaged", [1, 2])
def test_a_damaged_part_costs_an_attempt_and_nothing_else(num_damaged: int) -> None:
    world, draw = World(num_prefill=1, num_decode=1), random.Random(0)
    world.run_dry()  # until the router knows its nodes
    client = world.clients[world.submit(tuple(range(2, 20)), 1, SamplingParams(seed=3, max_tokens=6))]
    while num_damaged:
        damage = [act for act in world.faults() if act[0] == "damage"]
        if damage:
            world.act(damage[0])
            world.act(("transfer", damage[0][1]))
            num_damaged -= 1
        else:
            world.act(draw.choice(world.enabled()))
    world.run_dry()
    world.check_whole()
    assert client.end
    assert client.end.error is None
    assert client.end.timings.num_attempts > 1
    assert client.got == client.want


def test_a_decode_node_does_not_go_on_with_an_attempt_that_ended_while_its_session_was_down() -> None:
    """The prefill node hears late that it is over, and hands it over to the node, which is there again."""
    world, draw = World(num_prefill=1, num_decode=2), random.Random(1)
    world.run_dry()  # until the router knows its nodes
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    client = world.clients[world.submit(tuple(range(2, 20)), 1, params)]
    (attempt,) = client.state.attempts.values()
    assert attempt.decode
    late = ROUTER, attempt.prefill
    world.act(("deliver", late))
    world._sessions.break_off(world.nodes[attempt.decode])
    running = world.nodes[attempt.decode].core._running
    while attempt.id not in running:
        world.act(draw.choice([act for act in world.enabled() if act != ("deliver", late)]))
    assert attempt.id not in client.state.attempts
    sequence = running.get(attempt.id).sequences[0]
    while attempt.id in running:
        world.act(draw.choice(world.enabled()))
    assert sequence.num_output_tokens < params.max_tokens / 2
    world.run_dry()
    world.check_whole()
    assert client.got == client.want


def test_a_decode_node_that_loses_its_router_before_the_router_knows_costs_an_attempt() -> None:
    """The prefill node tells the router of it first."""
    world, draw = World(num_prefill=1, num_decode=2), random.Random(0)
    world.run_dry()  # until the router knows its nodes
    client = world.clients[world.submit(tuple(range(2, 20)), 1, SamplingParams(seed=3, max_tokens=6))]
    decode = [node for node in world.nodes.values() if node.role is NodeRole.DECODE]
    while not (leased := [node for node in decode if len(node.core._reservations)]):
        world.act(draw.choice(world.enabled()))
    late = leased[0].incarnation, ROUTER
    world._sessions.break_off(leased[0])
    while acts := [act for act in world.enabled() if act != ("deliver", late)]:
        world.act(draw.choice(acts))
    assert client.end, "the other decode node has answered"
    assert client.end.error is None
    assert client.end.timings.num_attempts == 2
    assert client.got == client.want
    world.run_dry()
    world.check_whole()
