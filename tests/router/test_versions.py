"""Several models, and several versions of one, behind one router: no request is ever of two of them."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import NodeUnavailable
from baton.messages import Adopted, GenerationDefaults, HandedOff, Load, NodeInfo, NodeRole, Prefill, Started, Tokens
from baton.sampling import SamplingParams
from router.life import RoutedRequest
from router.versions import ModelVersion, VersionGone, difference, shares, version_of
from tests.router.house import House, info


def node(name: str, fingerprint: str = "old", **changes: object) -> NodeInfo:
    """`p...` or `d...`, by its first letter."""
    plain = info(name, NodeRole.PREFILL if name[0] == "p" else NodeRole.DECODE)
    layout = dataclasses.replace(plain.layout, fingerprint=fingerprint)
    return dataclasses.replace(plain, layout=layout, **changes)  # type: ignore[arg-type]


OLD, NEW = version_of(node("d")), version_of(node("d", "new"))


def house_of(*nodes: NodeInfo, max_waiting: int = 100) -> House:
    house = House(max_waiting=max_waiting)
    for each in nodes:
        house.core.node_up(each, 0.0)
    return house


def submit(house: House, version: ModelVersion | None = OLD, name: str = "r") -> Prefill:
    request = RoutedRequest(name, (1, 2, 3), 1, SamplingParams(max_tokens=8), 60.0, version=version)
    house.core.submit(request, 0.0)
    house.collect()
    return house.prefills[-1][1]


def where(house: House) -> tuple[str, str | None]:
    name, prefill = house.prefills[-1]
    return name, prefill.decode.incarnation if prefill.decode else None


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_request_gets_nodes_of_its_version(version: ModelVersion) -> None:
    house = house_of(node("p1"), node("p2", "new"), node("d1"), node("d2", "new"))
    for i in range(4):
        submit(house, version, f"r{i}")
        assert where(house) == (("p1", "d1") if version == OLD else ("p2", "d2"))
    assert house.core.why_degraded(0.0) is None


def test_a_request_of_no_version_stays_with_that_of_its_first_nodes() -> None:
    house = house_of(node("p1"), node("d1"), node("d2"), node("d3", "new"), node("p3", "new"))
    prefill = submit(house, None)
    first = where(house)
    family = {"p1": {"d1", "d2"}, "p3": {"d3"}}[first[0]]
    assert first[1] in family
    house.say(first[0], prefill, Started(0, 0.0), Tokens(0, 0, (5,)))
    house.core.node_lost(str(first[1]), "killed", 1.0)
    house.collect()
    if family == {"d3"}:
        assert isinstance(house.end, NodeUnavailable)
    else:
        assert {str(first[1]), str(where(house)[1])} == family


def test_failover_stays_within_the_version() -> None:
    house = house_of(node("p1"), node("d1"), node("d2"), node("p9", "new"), node("d9", "new"))
    prefill = submit(house)
    _, decode = where(house)
    house.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)), HandedOff(0.1))
    house.say(str(decode), prefill, Adopted(0.1, 0, 9), Tokens(0, 1, (6,)))
    house.core.node_lost(str(decode), "killed", 1.0)
    house.collect()
    assert where(house) == ("p1", "d2" if decode == "d1" else "d1")
    assert house.prefills[-1][1].samples[0].output_tokens == (5, 6)


def test_a_request_with_tokens_ends_when_its_version_is_gone() -> None:
    house = house_of(node("p1"), node("d1"), node("p9", "new"), node("d9", "new"))
    prefill = submit(house)
    house.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)))
    house.core.node_lost("d1", "killed", 1.0)
    house.collect()
    assert len(house.prefills) == 1
    error = house.end
    assert isinstance(error, VersionGone)
    assert f"no node that serves {OLD.id} is left, and {NEW.id} is another model" in error.message


def test_a_request_without_a_token_becomes_one_of_the_version_that_is_left() -> None:
    house = house_of(node("p1"), node("d1"), node("p9", "new"), node("d9", "new"))
    prefill = submit(house)
    house.say("p1", prefill, Started(0, 0.0))
    house.core.node_lost("d1", "killed", 1.0)
    house.collect()
    assert where(house) == ("p9", "d9")
    assert house.prefills[-1][1].samples[0].output_tokens == ()


def test_a_prompt_that_would_be_another_one_is_not_sent_to_another_version() -> None:
    other = node("d9", "new", generation_defaults=GenerationDefaults(eos_token_ids=(7,)))
    house = house_of(node("d1"), other)
    submit(house)
    house.core.node_lost("d1", "killed", 1.0)
    house.collect()
    assert isinstance(house.end, VersionGone)
    with pytest.raises(VersionGone, match="the prompt would be another one"):
        submit(house, name="later")


def test_with_one_version_a_request_waits_for_its_node() -> None:
    house = house_of(node("d1"))
    prefill = submit(house)
    house.say("d1", prefill, Tokens(0, 0, (5,)))
    house.core.node_lost("d1", "killed", 1.0)
    house.core.node_up(node("d2", served_model_name="another model"), 1.0)
    house.collect()
    assert len(house.prefills) == 1, "which is not for it"
    house.core.node_up(node("d3"), 2.0)
    house.collect()
    assert where(house) == ("d3", None)


def test_who_waits_in_vain_is_told_when_the_other_version_comes() -> None:
    house = house_of(node("d1"))
    prefill = submit(house)
    house.say("d1", prefill, Tokens(0, 0, (5,)))
    submit(house, name="fresh")
    house.core.node_lost("d1", "killed", 1.0)
    house.core.node_up(node("d9", "new"), 2.0)
    house.collect()
    assert isinstance(house.end, VersionGone)
    assert (where(house)[0], house.prefills[-1][1].attempt_id.request_id) == ("d9", "fresh")


def test_one_model_without_nodes_holds_up_no_other() -> None:
    house = house_of(node("d1"))
    absent = version_of(node("d", served_model_name="absent"))
    house.core.submit(RoutedRequest("waits", (1,), 1, SamplingParams(), 60.0, version=absent), 0.0)
    house.core.node_lost("d1", "killed", 1.0)
    house.core.submit(RoutedRequest("goes", (1,), 1, SamplingParams(), 60.0, version=OLD), 1.0)
    house.core.node_up(node("d2"), 2.0)
    house.collect()
    assert [prefill.attempt_id.request_id for _, prefill in house.prefills] == ["goes"]


def test_nodes_that_do_not_fit_hold_up_no_other_model() -> None:
    house = house_of()
    other = node("d1", served_model_name="other")
    for version in (OLD, version_of(other)):
        request = RoutedRequest(version.name, (1,), 1, SamplingParams(), 60.0, version=version)
        house.core.submit(request, 0.0)
    misfit = node("d9")
    house.core.node_up(node("p9"), 1.0)
    house.core.node_up(dataclasses.replace(misfit, layout=dataclasses.replace(misfit.layout, block_size=32)), 1.0)
    house.core.node_up(other, 1.0)
    house.collect()
    assert [prefill.attempt_id.request_id for _, prefill in house.prefills] == ["other"]


def test_a_drained_node_gets_nothing_new_and_its_end_is_nobodys_fault() -> None:
    house = house_of(node("d1"), node("d2"))
    prefill = submit(house)
    first = house.prefills[-1][0]
    other = "d2" if first == "d1" else "d1"
    house.core.drain_node(first, True, 0.0)
    for i in range(3):
        submit(house, name=f"more-{i}")
        assert where(house)[0] == other
    assert house.core.is_on(first)
    house.core.drain_node(other, True, 0.0)
    assert house.core.why_not_ready() == "no prefill node and no decode node"
    house.core.drain_node(first, False, 0.0)
    house.say(first, prefill, Tokens(0, 0, (5,)))
    house.core.drain_node(first, True, 0.0)
    house.core.drain_node(other, False, 0.0)
    house.core.node_lost(first, "its session ended", 1.0)
    house.collect()
    assert (where(house)[0], house.prefills[-1][1].samples[0].output_tokens) == (other, (5,))
    house.core.node_lost(other, "killed", 2.0)
    house.core.node_up(node("d3"), 2.0)
    house.collect()
    assert where(house)[0] == "d3", "one node is lost, not two"
    assert not house.core.is_on(other)


def test_ready_and_degraded_speak_of_versions() -> None:
    house = house_of(node("p1"), node("d1", "new"))
    assert house.core.why_not_ready() is None
    degraded = str(house.core.why_degraded(0.0))
    assert f"no prefill node for {NEW.id}" in degraded
    assert f"no decode node for {OLD.id} (LayoutMismatch fingerprint old != new of d1)" in degraded
    ((prefill, decode, reason),) = house.core.pool.misfits()
    assert (prefill.node_id, decode.node_id, reason) == ("p1", "d1", "LayoutMismatch fingerprint old != new of d1")
    house.core.node_lost("d1", "killed", 1.0)
    house.core.node_up(node("p2", "new"), 1.0)
    assert house.core.why_not_ready() == f"{OLD.id}: no decode node; {NEW.id}: no decode node"


def test_versions_share_requests_by_the_scarcer_role() -> None:
    house = house_of(*(node(name) for name in ("p1", "p2", "p3", "d1")), node("p9", "new"), node("d9", "new"))
    assert house.core.pool.shares("m") == {OLD.id: 0.5, NEW.id: 0.25}
    assert house.core.pool.shares("other") == {}
    house.core.node_load("d9", Load(draining=True), 0.0)
    assert house.core.pool.shares("m") == {OLD.id: 1.0}
    assert shares({OLD: (0, 6), NEW: (2, 2)}) == {OLD.id: 0.375, NEW.id: 0.25}, "decode nodes alone count half"


def test_what_makes_a_version() -> None:
    plain = node("d1")
    for changes in ({"served_model_name": "n"}, {"tokenizer_digest": "x"}):
        other = node("d2", **changes)
        assert version_of(other) != version_of(plain)
        assert str(next(iter(changes))) in str(difference(plain, other))
    assert difference(plain, node("d2", "new")) == "fingerprint old of d1 != new of d2"
    alike = node("d2", chat_template="{{ messages }}", max_model_len=9)
    assert version_of(alike) == version_of(plain)
    assert version_of(alike).dialect != version_of(plain).dialect
    assert difference(plain, alike) is None
