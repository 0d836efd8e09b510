"""Requests of every kind at once, on nodes with every kind of settings, raced: `test_simulation` has the plain ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

import decode_node.leases
from baton.block_hash import chain
from baton.errors import InvalidRequest
from baton.layout import KvSlice
from baton.messages import Load
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.step_padding import UNPADDED, StepPadding
from router.policies.registry import POLICIES, find_policy
from tests.protocol.fake_grammars import structured
from tests.protocol.fake_model import VOCAB_SIZE, FakeModel
from tests.protocol.network import ROUTER
from tests.protocol.node import BLOCK_SIZE, MAX_MODEL_LEN
from tests.protocol.test_simulation import DIVIDED, DIVISIONS, FIRST_TOKEN, WINDOWS
from tests.protocol.world import World


class BusyWorld(World):
    """Its nodes tell their loads, by which the router places requests, keeps them back and moves them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._told: dict[str, Load] = {}
        super().__init__(*args, **kwargs)

    def _pass(self, seconds: float) -> None:
        for incarnation, node in self.nodes.items():
            load = node.core.load()
            if node.subscribed and (self.live() or load != self._told.get(incarnation)):
                self._told[incarnation] = load
                self._streams.send(incarnation, ROUTER, partial(self._hear_load, incarnation, load))
        super()._pass(seconds)

    def _hear_load(self, incarnation: str, load: Load) -> None:
        self.router.node_load(incarnation, load, self.now)


def some_settings(draw: random.Random, role: NodeRole) -> Mapping[str, Any]:
    settings: dict[str, Any] = {
        "max_num_seqs": draw.choice([2, 4, 6, 8]),
        "max_num_batched_tokens": draw.choice([2, 10, 10, 40]),
        "padding": draw.choice([UNPADDED, StepPadding(((2, (2, 5)), (8, (3, 6))))]),
    }
    if role is NodeRole.PREFILL:
        return settings | {"saturating_num_tokens": draw.choice([None, 8]), "num_stages": draw.choice([1, 1, 3])}
    return settings | {"target_itl_s": draw.choice([None, 1e-9, 0.01])}


def most_blocks(settings: Mapping[str, Any], windows: tuple[int | None, ...]) -> int:
    """That one request may need."""
    sizes: dict[str, Any] = {"num_blocks": 10_000, "vocab_size": VOCAB_SIZE, "block_size": BLOCK_SIZE, **settings}
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, async_scheduling=True, windows=windows, **sizes)
    return config.most_blocks(MAX_MODEL_LEN)


def some_sampling(draw: random.Random, prompt: tuple[int, ...], n: int) -> SamplingParams:
    kind, seed, max_tokens = draw.random(), draw.randrange(9), draw.randint(1, 20)
    if kind < 0.2 and n > 1:
        return SamplingParams(temperature=0.0, beam_width=n, max_tokens=max_tokens, ignore_eos=draw.random() < 0.3)
    matcher = None
    if kind > 0.6:
        ends = {draw.choice(["finishes_at", "finishes_at", "fails_at", "neither"]): draw.randint(1, max_tokens)}
        ends.pop("neither", None)
        matcher = structured(prompt, seed if n == 1 else None, compiles=draw.random() > 0.1, **ends)
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=draw.random() < 0.3,
        stop_token_ids=draw.choice([frozenset(), frozenset(), frozenset(range(2, 12))]),
        num_prompt_logprobs=draw.choice([None, None, None, 0]),
        presence_penalty=draw.choice([0.0, 0.0, 0.5]),
        structured_outputs=matcher,
    )


def submit_one(world: World, draw: random.Random) -> None:
    prompt = tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randint(1, 40)))
    if draw.random() < 0.5 and world.clients:  # a prefix that somebody has sent before
        old = draw.choice(list(world.clients.values())).request.prompt_tokens
        prompt = (old + prompt)[:40]
    n, salt = draw.choice([1, 1, 1, 2, 2, 4]), draw.choice(["", "", "salt"])
    world.submit(
        prompt,
        n,
        some_sampling(draw, prompt, n),
        draw.choice([0.5, 1e6, 1e6]),
        priority=draw.choice([0, 0, 0, -1, 1]),
        cache_salt=salt,
        block_hashes=tuple(chain(prompt, BLOCK_SIZE, salt)),
    )


def race(seed: int, num_acts: int = 400) -> World:
    """Every other pair of seeds handles prompts of a few blocks as long ones."""
    with pytest.MonkeyPatch.context() as patched:
        if seed % 4 > 1:
            patched.setattr(decode_node.leases, "LONG_BLOCKS", 3)
        return _race(random.Random(seed), num_acts, draw_faults=(seed % 3) * 0.06)


def _race(draw: random.Random, num_acts: int, draw_faults: float) -> World:
    windows = draw.choice([(None, None), *WINDOWS])
    ranks: dict[NodeRole, tuple[KvSlice, ...]] = {}
    if windows == (None, None) and draw.random() < 0.3:
        ranks = dict(zip(NodeRole, map(DIVISIONS.__getitem__, draw.choice(DIVIDED)), strict=True))
    settings = {role: some_settings(draw, role) for role in NodeRole}
    groups = FakeModel(2, BLOCK_SIZE, windows=windows).layout.windows
    num_blocks = 2 + max(most_blocks(own, groups) for own in settings.values()) + draw.randrange(40)
    world = draw.choice([World, BusyWorld])(
        num_prefill=draw.choice([1, 2, 2, 3]),
        num_decode=draw.choice([1, 2, 2, 3]),
        num_blocks=num_blocks,
        num_slots=draw.choice([1, 2, 4]),
        first_token=draw.choice(FIRST_TOKEN),
        ranks=ranks,
        windows=windows,
        settings=settings,
        router={
            "policy": find_policy(draw.choice([*POLICIES])),
            "draw": draw,
            "migrate_above": draw.choice([None, 0.1, 0.4]),
            "max_waiting_tokens": draw.choice([0, 0, 60]),
        },
        has_grammars=True,
    )
    for _ in range(num_acts):
        if draw.random() < 0.05:
            submit_one(world, draw)
        world.act_at_random(draw, draw_faults)
    world.run_dry()
    world.check_whole()
    return world


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 120))])
def test_none_is_lost(seed: int) -> None:
    world = race(seed)
    if seed % 3 == 0:
        for client in world.clients.values():
            assert client.end
            if client.request.deadline_s > 1:
                assert client.end.error is None or isinstance(client.end.error, InvalidRequest)
            if client.end.error is None:
                assert client.got == client.want
