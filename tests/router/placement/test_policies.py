"""Placement policies: what each chooses, and what holds for all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages import Prefill
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from router.plugins import UnknownPlugin
from router.policies import POLICIES, Candidate, Option, Options, Policy, find_policy
from router.policies.cost import NEAR, Prices
from router.requests.actions import ToNode
from router.requests.core import RouterCore
from router.requests.request_state import RoutedRequest
from tests.router.rig import info

SECONDS = st.floats(0.0, 10.0).map(lambda value: round(value, 3))
VALUES = st.fixed_dictionaries(
    {
        "backlog": st.tuples(st.integers(0, 9), st.integers(0, 9)),
        "busy": st.tuples(st.integers(0, 9), st.integers(0, 9)),
        "num_cached": st.integers(0, 64),
        "queue_s": SECONDS,
        "prefill_s": SECONDS,
        "handoff_s": SECONDS,
        "num_running": st.integers(0, 200),
        "fill": st.floats(0.0, 3.0),
        "bounds_gaps": st.booleans(),
    }
)


def nodes(letter: str, values: list[dict]) -> list[Candidate]:
    return [Candidate(f"{letter}{i}", f"{letter}{i}", **each) for i, each in enumerate(values)]


@st.composite
def some_options(draw: st.DrawFn) -> Options:
    """With at least one pair, or a decode node alone."""
    prefills = nodes("p", draw(st.lists(VALUES, max_size=6)))
    decodes = nodes("d", draw(st.lists(VALUES, min_size=1, max_size=6)))
    misfits = draw(st.sets(st.tuples(st.sampled_from(range(6)), st.sampled_from(range(6)))))
    pairs = {(p.node_id, d.node_id) for i, p in enumerate(prefills) for j, d in enumerate(decodes)} - {
        (f"p{i}", f"d{j}") for i, j in misfits
    }
    alone = [node for node in decodes if node.bounds_gaps] if pairs else decodes
    fits = lambda p, d: (p.node_id, d.node_id) in pairs  # noqa: E731
    return Options(prefills, decodes, fits, alone, draw(st.integers(0, 100)), draw(st.integers(64, 4096)))


def names(option: Option) -> tuple[str | None, ...]:
    return tuple(node.node_id if node else None for node in option)


def choose(name: str, options: Options, seed: int = 0) -> Option:
    return find_policy(name).choose(options, Random(seed))


@pytest.mark.parametrize("name", POLICIES)
@given(options=some_options(), seed=st.integers(0, 3))
def test_the_choice_is_an_option_and_follows_from_what_is_given(name: str, options: Options, seed: int) -> None:
    chosen = choose(name, options, seed)
    assert chosen in list(options)
    assert choose(name, options, seed) == chosen
    if not find_policy(name).uses_decode_alone and any(options.pairs()):
        assert chosen.decode


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"random"}))
@given(options=some_options(), data=st.data())
def test_the_order_of_the_nodes_does_not_matter(name: str, options: Options, data: st.DataObject) -> None:
    prefills, decodes, alone = (
        data.draw(st.permutations(list(kind))) for kind in (options.prefills, options.decodes, options.alone)
    )
    shuffled = Options(prefills, decodes, options.fits, alone, options.turn, options.num_tokens)
    assert choose(name, shuffled) == choose(name, options)


@given(some_options(), st.integers(0, 5))
def test_no_option_is_much_cheaper_than_the_one_chosen_by_cost(options: Options, seed: int) -> None:
    chosen = choose("cost", options, seed)
    cost = Prices.of(options).option
    assert cost(chosen) <= (1 + NEAR) * min(cost(option) for option in options) + 1e-12


@given(some_options(), SECONDS, st.integers(0, 50))
def test_more_work_never_makes_a_node_cheaper(options: Options, seconds: float, number: int) -> None:
    cost = Prices.of(options).option
    for option in options:
        first = option.prefill
        later = (
            first._replace(queue_s=first.queue_s + seconds),
            first._replace(prefill_s=first.prefill_s + seconds),
            first._replace(num_running=first.num_running + number),
        )
        assert all(cost(option._replace(prefill=each)) >= cost(option) for each in later)
        if last := option.decode:
            fuller = last._replace(fill=last.fill + seconds, handoff_s=last.handoff_s + seconds)
            assert cost(option._replace(decode=fuller)) >= cost(option)


P = Candidate("p", "p", prefill_s=0.1)
D = Candidate("d", "d", prefill_s=0.2, num_running=20, fill=0.3, bounds_gaps=True)


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (P, D, ("p", "d")),  # an idle prefill node
        (P._replace(queue_s=1.0), D, ("d", None)),  # a queue
        (P._replace(queue_s=1.0), D._replace(bounds_gaps=False), ("p", "d")),  # no promise to its streams
        (P._replace(queue_s=0.2), D._replace(num_running=200), ("p", "d")),  # too many streams to disturb
        (P, D._replace(prefill_s=0.01), ("d", None)),  # the decode node has most of it
    ],
)
def test_cost_uses_a_decode_node_alone_where_that_is_cheaper(prefill, decode, expected) -> None:
    alone = [decode] if decode.bounds_gaps else []
    assert names(choose("cost", Options([prefill], [decode], lambda p, d: True, alone))) == expected


@pytest.mark.parametrize(
    ("queues_s", "expected"),
    [
        ((0.09, 0.0, 0.0, 0.0), "p0"),  # less than is saved
        ((0.11, 0.0, 0.0, 0.0), "p1"),  # more
        ((5.0, 0.0, 0.0, 5.0), "p1"),  # others find an idle node, too
        ((5.0, 0.0, 5.0, 5.0), "p0"),  # others have to wait
        ((0.3, 0.0, 0.1, 0.1), "p0"),  # more than is saved, but less than that with what others wait for longer
        ((0.5, 0.0, 0.1, 0.1), "p1"),
    ],
)
def test_cost_computes_a_prompt_again_the_more_readily_the_less_others_wait(queues_s, expected) -> None:
    values = [{"num_cached": 1000, "prefill_s": 0.02}, {"prefill_s": 0.12}, {"prefill_s": 0.14}, {"prefill_s": 0.14}]
    prefills = nodes("p", [value | {"queue_s": queue_s} for value, queue_s in zip(values, queues_s, strict=True)])
    assert names(choose("cost", Options(prefills, [D], lambda p, d: True, num_tokens=1200))) == (expected, "d")


def test_cost_finds_a_pair_that_works_behind_better_ones_that_do_not() -> None:
    prefills = nodes("p", [{"prefill_s": 0.1 * i} for i in range(6)])
    decodes = nodes("d", [{"fill": 0.1 * i} for i in range(6)])
    options = Options(prefills, decodes, lambda p, d: (p.node_id, d.node_id) == ("p5", "d5"))
    assert names(choose("cost", options)) == ("p5", "d5")


def drawn_by_cost(prefills: list[Candidate], decodes: list[Candidate]) -> set[tuple[str | None, ...]]:
    options = Options(prefills, decodes, lambda p, d: True)
    return {names(choose("cost", options, seed)) for seed in range(200)}


def test_cost_draws_among_equals() -> None:
    """Among all of them, however many nodes it looks at in pairs."""
    equal = [Candidate(f"p{i}", f"p{i}", prefill_s=0.1 + 1e-4 * i) for i in range(9)]
    slow = Candidate("q", "q", prefill_s=0.2)
    assert drawn_by_cost([*equal[:3], slow], [D]) == {(f"p{i}", "d") for i in range(3)}
    assert drawn_by_cost([*equal, slow], [D]) == {(f"p{i}", "d") for i in range(9)}
    decodes = [Candidate(f"d{i}", f"d{i}", handoff_s=0.01) for i in range(9)]
    assert {decode for _, decode in drawn_by_cost([P], decodes)} == {f"d{i}" for i in range(9)}


def test_cost_draws_neither_a_longer_queue_nor_a_busier_decode_node() -> None:
    prefills = [Candidate(f"p{i}", f"p{i}", queue_s=0.5 + 1e-3 * i, prefill_s=0.1) for i in range(6)]
    decodes = [Candidate(f"d{i}", f"d{i}", busy=(1000 * i, i), handoff_s=0.004) for i in range(6)]
    assert drawn_by_cost(prefills, decodes) == {("p0", "d0")}
    assert drawn_by_cost(prefills[:2], decodes[:2]) == {("p0", "d0")}


def test_prefix_goes_where_most_is_cached_and_least_loaded_does_not() -> None:
    idle = Candidate("p0", "p0")
    holder = Candidate("p1", "p1", backlog=(500, 1), num_cached=32)
    options = Options([idle, holder], [D, Candidate("e", "e", busy=(9, 9), num_cached=16)], lambda p, d: True)
    assert names(choose("prefix", options)) == ("p1", "e")
    assert names(choose("least-loaded", options)) == ("p0", "d")


@given(st.integers(1, 6), st.integers(1, 6))
def test_round_robin_uses_all_pairs_in_turn(num_prefill: int, num_decode: int) -> None:
    """And all nodes of a kind before one comes again, but where the pairs shift."""
    prefills, decodes = nodes("p", [{}] * num_prefill), nodes("d", [{}] * num_decode)
    num_pairs = num_prefill * num_decode
    turns = [Options(prefills, decodes, lambda p, d: True, (), turn) for turn in range(num_pairs)]
    found = [names(choose("round-robin", options)) for options in turns]
    assert len(set(found)) == num_pairs
    for kind, number in ((0, num_prefill), (1, num_decode)):
        for first in range(0, num_pairs, math.lcm(num_prefill, num_decode)):
            assert len({pair[kind] for pair in found[first : first + number]}) == number


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(UnknownPlugin, match="none called 'best'; there are cost, least-loaded, prefix"):
        find_policy("best")


class Faulty(Policy):
    """Fails, or returns what it is told to."""

    name = "faulty"

    def __init__(self, choice: Callable[[Options], object]) -> None:
        self._choice = choice

    def choose(self, options: Options, draw: Random) -> Option:
        return self._choice(options)  # type: ignore[return-value]


def fail(options: Options) -> object:
    raise KeyError("p1")


@pytest.mark.parametrize(
    "choice",
    [
        fail,
        lambda options: None,
        lambda options: Option(Candidate("p9", "p9"), options.decodes[0]),
        lambda options: Option(options.prefills[0], Candidate("d9", "d9")),
        lambda options: Option(options.decodes[0], None),  # it does not compute prompts beside prefill nodes
        lambda options: next(option for option in itertools.product(options.prefills, options.decodes)),
    ],
)
def test_a_policy_that_fails_costs_no_request(
    choice: Callable[[Options], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Also where no client could be told: the request has waited, and a node's message has it placed."""
    core = RouterCore(1, policy=Faulty(choice))
    core.submit(RoutedRequest("waits", (1, 2), 1, SamplingParams(), 9.0), 0.0)
    core.node_up(info("p1", NodeRole.PREFILL), 1.0)
    core.node_up(info("d1", NodeRole.DECODE), 1.0)
    core.submit(RoutedRequest("new", (1, 2), 1, SamplingParams(), 9.0), 2.0)
    sent = [action.message for action in core.actions if isinstance(action, ToNode)]
    targets = [(message.target_incarnation, message.decode) for message in sent if isinstance(message, Prefill)]
    assert [(prefill, decode and decode.incarnation) for prefill, decode in targets] == [("p1", "d1")] * 2
    assert "policy=faulty" in caplog.text
