"""Several models, and several versions of one, behind one router: no request is ever of two of them."""

from __future__ import annotations

import dataclasses

import pytest

from baton.errors import NodeUnavailable
from baton.messages import Adopted, HandedOff, Load, Prefill, Started, Tokens
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole
from baton.prompt_logprobs import PromptLogprobs
from baton.sampling import SamplingParams
from router.requests.admission import Full
from router.requests.request_state import RoutedRequest
from router.versions import ModelVersion, VersionGone, difference, shares, version_of
from tests.router.rig import RouterRig, info


def node(name: str, fingerprint: str = "old", **changes: object) -> NodeInfo:
    """`p...` or `d...`, by its first letter."""
    plain = info(name, NodeRole.PREFILL if name[0] == "p" else NodeRole.DECODE)
    layout = dataclasses.replace(plain.layout, fingerprint=fingerprint)
    return dataclasses.replace(plain, layout=layout, **changes)  # type: ignore[arg-type]


OLD, NEW = version_of(node("d")), version_of(node("d", "new"))


def house_of(*nodes: NodeInfo, max_waiting: int = 100, max_waiting_tokens: int = 0) -> RouterRig:
    rig = RouterRig(max_waiting=max_waiting, max_waiting_tokens=max_waiting_tokens)
    for each in nodes:
        rig.core.node_up(each, 0.0)
    return rig


def submit(rig: RouterRig, version: ModelVersion | None = OLD, name: str = "r") -> Prefill:
    request = RoutedRequest(name, (1, 2, 3), 1, SamplingParams(max_tokens=8), 60.0, version=version)
    rig.core.submit(request, 0.0)
    rig.collect()
    return rig.prefills[-1][1]


def where(rig: RouterRig) -> tuple[str, str | None]:
    name, prefill = rig.prefills[-1]
    return name, prefill.decode.incarnation if prefill.decode else None


@pytest.mark.parametrize("version", [OLD, NEW])
def test_a_request_gets_nodes_of_its_version(version: ModelVersion) -> None:
    rig = house_of(node("p1"), node("p2", "new"), node("d1"), node("d2", "new"))
    for i in range(4):
        submit(rig, version, f"r{i}")
        assert where(rig) == (("p1", "d1") if version == OLD else ("p2", "d2"))
    assert rig.core.pool.why_degraded(0.0) is None


def test_a_request_of_no_version_stays_with_that_of_its_first_nodes() -> None:
    rig = house_of(node("p1"), node("d1"), node("d2"), node("d3", "new"), node("p3", "new"))
    prefill = submit(rig, None)
    first = where(rig)
    family = {"p1": {"d1", "d2"}, "p3": {"d3"}}[first[0]]
    assert first[1] in family
    rig.say(first[0], prefill, Started(0, 0.0), Tokens(0, 0, (5,)))
    rig.core.node_lost(str(first[1]), "killed", 1.0)
    rig.collect()
    if family == {"d3"}:
        assert isinstance(rig.end, NodeUnavailable)
    else:
        assert {str(first[1]), str(where(rig)[1])} == family


def test_failover_stays_within_the_version() -> None:
    rig = house_of(node("p1"), node("d1"), node("d2"), node("p9", "new"), node("d9", "new"))
    prefill = submit(rig)
    _, decode = where(rig)
    rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)), HandedOff(0.1))
    rig.say(str(decode), prefill, Adopted(0.1, 0, 9), Tokens(0, 1, (6,)))
    rig.core.node_lost(str(decode), "killed", 1.0)
    rig.collect()
    assert where(rig) == ("p1", "d2" if decode == "d1" else "d1")
    assert rig.prefills[-1][1].samples[0].output_tokens == (5, 6)


def test_a_request_with_tokens_ends_when_its_version_is_gone() -> None:
    rig = house_of(node("p1"), node("d1"), node("p9", "new"), node("d9", "new"))
    prefill = submit(rig)
    rig.say("p1", prefill, Started(0, 0.0), Tokens(0, 0, (5,)))
    rig.core.node_lost("d1", "killed", 1.0)
    rig.collect()
    assert len(rig.prefills) == 1
    error = rig.end
    assert isinstance(error, VersionGone)
    assert f"no node that serves {OLD.id} is left, and {NEW.id} is another model" in error.message


def test_logprobs_of_a_prompt_are_of_one_version() -> None:
    rig = house_of(node("p1"), node("d1"), node("p9", "new"), node("d9", "new"))
    params = SamplingParams(max_tokens=8, num_prompt_logprobs=0)
    rig.core.submit(RoutedRequest("r", (1, 2, 3), 1, params, 60.0, version=OLD), 0.0)
    rig.collect()
    rig.say("p1", rig.prefills[-1][1], Started(0, 0.0), PromptLogprobs(1, 0, bytes(4), bytes(4)))
    rig.core.node_lost("d1", "killed", 1.0)
    rig.collect()
    assert isinstance(rig.end, VersionGone)


def test_a_request_without_a_token_becomes_one_of_the_version_that_is_left() -> None:
    rig = house_of(node("p1"), node("d1"), node("p9", "new"), node("d9", "new"))
    prefill = submit(rig)
    rig.say("p1", prefill, Started(0, 0.0))
    rig.core.node_lost("d1", "killed", 1.0)
    rig.collect()
    assert where(rig) == ("p9", "d9")
    assert rig.prefills[-1][1].samples[0].output_tokens == ()


def test_a_prompt_that_would_be_another_one_is_not_sent_to_another_version() -> None:
    other = node("d9", "new", generation_defaults=GenerationDefaults(eos_token_ids=(7,)))
    rig = house_of(node("d1"), other)
    submit(rig)
    rig.core.node_lost("d1", "killed", 1.0)
    rig.collect()
    assert isinstance(rig.end, VersionGone)
    with pytest.raises(VersionGone, match="the prompt would be another one"):
        submit(rig, name="later")


def test_with_one_version_a_request_waits_for_its_node() -> None:
    rig = house_of(node("d1"))
    prefill = submit(rig)
    rig.say("d1", prefill, Tokens(0, 0, (5,)))
    rig.core.node_lost("d1", "killed", 1.0)
    rig.core.node_up(node("d2", served_model_name="another model"), 1.0)
    rig.collect()
    assert len(rig.prefills) == 1, "which is not for it"
    rig.core.node_up(node("d3"), 2.0)
    rig.collect()
    assert where(rig) == ("d3", None)


def test_who_waits_in_vain_is_told_when_the_other_version_comes() -> None:
    rig = house_of(node("d1"))
    prefill = submit(rig)
    rig.say("d1", prefill, Tokens(0, 0, (5,)))
    submit(rig, name="fresh")
    rig.core.node_lost("d1", "killed", 1.0)
    rig.core.node_up(node("d9", "new"), 2.0)
    rig.collect()
    assert isinstance(rig.end, VersionGone)
    assert (where(rig)[0], rig.prefills[-1][1].attempt_id.request_id) == ("d9", "fresh")


@pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
def test_who_becomes_one_of_the_version_that_is_left_has_its_place_there(
    first: ModelVersion, second: ModelVersion
) -> None:
    rig = house_of(node("p1"), node("d1"), node("p9", "new"), node("d9", "new"))
    for name in ("d1", "d9"):
        rig.core.node_load(name, Load(0, 1, 0, 100), 0.0)

    def wants(name: str, num_tokens: int, version: ModelVersion, now: float) -> None:
        request = RoutedRequest(name, (1,) * num_tokens, 1, SamplingParams(max_tokens=8), 60.0, version=version)
        rig.core.submit(request, now)

    wants("long", 32, first, 0.0)
    if second == OLD:
        wants("short", 1, second, 1.0)
    rig.core.node_lost("d1", "killed", 2.0)
    rig.core.node_load("d9", Load(0, 1, 3, 100), 2.0)
    if second == NEW:
        wants("short", 1, second, 3.0)
    rig.collect()
    assert rig.prefills == [], "there is room for the short one alone"
    rig.core.node_load("d9", Load(0, 1, 10, 100), 4.0)
    rig.collect()
    assert [prefill.attempt_id.request_id for _, prefill in rig.prefills] == ["long", "short"]


def test_one_model_without_nodes_holds_up_no_other() -> None:
    rig = house_of(node("d1"))
    absent = version_of(node("d", served_model_name="absent"))
    rig.core.submit(RoutedRequest("waits", (1,), 1, SamplingParams(), 60.0, version=absent), 0.0)
    rig.core.node_lost("d1", "killed", 1.0)
    rig.core.submit(RoutedRequest("goes", (1,), 1, SamplingParams(), 60.0, version=OLD), 1.0)
    rig.core.node_up(node("d2"), 2.0)
    rig.collect()
    assert [prefill.attempt_id.request_id for _, prefill in rig.prefills] == ["goes"]


def test_one_model_without_nodes_takes_no_other_ones_place_to_wait() -> None:
    rig = house_of(node("p1"), node("d1"), max_waiting=2, max_waiting_tokens=100)
    rig.core.node_load("d1", Load(0, 1, 0, 100), 0.0)
    absent, away = (version_of(node("d", served_model_name=name)) for name in ("absent", "away"))

    def wants(name: str, version: ModelVersion) -> None:
        request = RoutedRequest(name, (1,) * 52, 1, SamplingParams(max_tokens=8), 60.0, version=version)
        rig.core.submit(request, 0.0)

    for name in "ab":
        wants(name, absent)
    with pytest.raises(NodeUnavailable, match="and 2 requests wait for one already"):
        wants("c", absent)
    wants("for a node", away)
    wants("for room", OLD)
    with pytest.raises(Full, match="requests of 60 of 100 tokens wait"):
        wants("for room, too", OLD)


def test_nodes_that_do_not_fit_hold_up_no_other_model() -> None:
    rig = house_of()
    other = node("d1", served_model_name="other")
    for version in (OLD, version_of(other)):
        request = RoutedRequest(version.name, (1,), 1, SamplingParams(), 60.0, version=version)
        rig.core.submit(request, 0.0)
    misfit = node("d9")
    rig.core.node_up(node("p9"), 1.0)
    rig.core.node_up(dataclasses.replace(misfit, layout=dataclasses.replace(misfit.layout, block_size=32)), 1.0)
    rig.core.node_up(other, 1.0)
    rig.collect()
    assert [prefill.attempt_id.request_id for _, prefill in rig.prefills] == ["other"]


def test_a_drained_node_gets_nothing_new_and_its_end_is_nobodys_fault() -> None:
    rig = house_of(node("d1"), node("d2"))
    prefill = submit(rig)
    first = rig.prefills[-1][0]
    other = "d2" if first == "d1" else "d1"
    rig.core.drain_node(first, True, 0.0)
    for i in range(3):
        submit(rig, name=f"more-{i}")
        assert where(rig)[0] == other
    assert rig.core.is_on(first)
    rig.core.drain_node(other, True, 0.0)
    assert rig.core.pool.why_not_ready() == "no prefill node and no decode node"
    rig.core.drain_node(first, False, 0.0)
    rig.say(first, prefill, Tokens(0, 0, (5,)))
    rig.core.drain_node(first, True, 0.0)
    rig.core.drain_node(other, False, 0.0)
    rig.core.node_lost(first, "its session ended", 1.0)
    rig.collect()
    assert (where(rig)[0], rig.prefills[-1][1].samples[0].output_tokens) == (other, (5,))
    rig.core.node_lost(other, "killed", 2.0)
    rig.core.node_up(node("d3"), 2.0)
    rig.collect()
    assert where(rig)[0] == "d3", "one node is lost, not two"
    assert not rig.core.is_on(other)


def test_ready_and_degraded_speak_of_versions() -> None:
    rig = house_of(node("p1"), node("d1", "new"))
    assert rig.core.pool.why_not_ready() is None
    degraded = str(rig.core.pool.why_degraded(0.0))
    assert f"no prefill node for {NEW.id}" in degraded
    assert f"no decode node for {OLD.id} (LayoutMismatch fingerprint old != new of d1)" in degraded
    ((prefill, decode, reason),) = rig.core.pool.unused_pairs(0.0)
    assert (prefill.node_id, decode.node_id, reason) == ("p1", "d1", "LayoutMismatch fingerprint old != new of d1")
    rig.core.node_lost("d1", "killed", 1.0)
    rig.core.node_up(node("p2", "new"), 1.0)
    assert rig.core.pool.why_not_ready() == f"{OLD.id}: no decode node; {NEW.id}: no decode node"


def test_versions_share_requests_by_the_scarcer_role() -> None:
    rig = house_of(*(node(name) for name in ("p1", "p2", "p3", "d1")), node("p9", "new"), node("d9", "new"))
    assert rig.core.pool.shares("m") == {OLD.id: 0.5, NEW.id: 0.25}
    assert rig.core.pool.shares("other") == {}
    rig.core.node_load("d9", Load(draining=True), 0.0)
    assert rig.core.pool.shares("m") == {OLD.id: 1.0}
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
    assert version_of(alike).prompt_format != version_of(plain).prompt_format
    assert difference(plain, alike) is None
