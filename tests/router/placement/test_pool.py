"""Which nodes fit together, and that it is found out once for each pair."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from baton.layout import KvLayout, LayerKv
from baton.messages import Load
from baton.node_info import NodeInfo, NodeRole
from router.placement import compatibility
from router.placement.circuit_breakers import FIRST_OUT_S, MAX_FAILURES
from router.placement.pool import Pool
from router.policies.registry import POLICIES, find_policy
from tests.router.rig import info


def otherwise(node: NodeInfo) -> NodeInfo:
    """The same node, with blocks of another size."""
    return dataclasses.replace(node, layout=dataclasses.replace(node.layout, block_size=32))


def test_a_node_that_says_something_else_of_itself_is_compared_again() -> None:
    pool, prefill, decode, other = (
        Pool(),
        info("p1", NodeRole.PREFILL),
        info("d1", NodeRole.DECODE),
        info("d2", NodeRole.DECODE),
    )
    for node in (prefill, decode, other):
        pool.add(node, 0.0)
    source = pool.get("d2")
    assert source is not None
    assert (pool.unused_pairs(0.0), [node.info for node in pool.targets(source, 0.0)]) == ([], [decode])
    pool.add(otherwise(decode), 0.0)
    assert [(p.node_id, d.node_id) for p, d, _ in pool.unused_pairs(0.0)] == [("p1", "d1")]
    assert pool.targets(source, 0.0) == []
    pool.add(decode, 0.0)
    assert (pool.unused_pairs(0.0), [node.info for node in pool.targets(source, 0.0)]) == ([], [decode])
    pool.add(otherwise(prefill), 0.0)
    assert len(pool.unused_pairs(0.0)) == 2
    pool.remove("p1")
    assert pool.unused_pairs(0.0) == []


def test_a_node_that_fits_no_other_has_no_partner() -> None:
    pool, prefill, decode = Pool(), info("p1", NodeRole.PREFILL), info("d1", NodeRole.DECODE)
    pool.add(otherwise(prefill), 0.0)
    assert pool.without_partner() == {}, "it waits for a decode node"
    pool.add(decode, 0.0)
    assert set(pool.without_partner()) == {"p1", "d1"}, "no request is answered"
    pool.add(info("p2", NodeRole.PREFILL), 0.0)
    assert set(pool.without_partner()) == {"p1"}
    pool.remove("p2")
    pool.remove("p1")
    assert pool.without_partner() == {}, "a decode node works alone"


def test_nodes_and_pairs_that_fail_are_told_while_they_are_avoided() -> None:
    pool = Pool()
    for node in (info("p1", NodeRole.PREFILL), info("d1", NodeRole.DECODE)):
        pool.add(node, 0.0)
    for _ in range(MAX_FAILURES):
        assert (pool.avoided(0.0), pool.unused_pairs(0.0)) == ({}, [])
        pool.failed("d1", "CUDA error", 0.0)
        pool.pair_breakers.failed(("p1", "d1"), "the endpoint broke", 0.0)
    assert pool.avoided(0.0) == {"d1": "CUDA error"}
    assert [(p.node_id, d.node_id, why) for p, d, why in pool.unused_pairs(0.0)] == [("p1", "d1", "the endpoint broke")]
    assert (pool.avoided(FIRST_OUT_S), pool.unused_pairs(FIRST_OUT_S)) == ({}, [])


def test_an_old_prefill_node_has_no_partner_once_all_decode_nodes_are_new() -> None:
    pool, prefill, decode = Pool(), info("p1", NodeRole.PREFILL), info("d1", NodeRole.DECODE)
    pool.add(prefill, 0.0)
    pool.add(dataclasses.replace(decode, layout=dataclasses.replace(decode.layout, fingerprint="new")), 0.0)
    assert set(pool.without_partner()) == {"p1"}, "a decode node without prefill nodes of its version works alone"


def test_each_pair_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts of many layers take time, in which a router does nothing else."""
    compared: list[tuple[str, str]] = []
    mismatch = compatibility.mismatch

    def noted(prefill: NodeInfo, decode: NodeInfo) -> str | None:
        compared.append((prefill.node_id, decode.node_id))
        return mismatch(prefill, decode)

    monkeypatch.setattr(compatibility, "mismatch", noted)
    pool = Pool()
    for number in range(4):
        pool.add(info(f"p{number}", NodeRole.PREFILL), 0.0)
        pool.add(info(f"d{number}", NodeRole.DECODE), 0.0)
    assert len(compared) == len(set(compared)) == 16
    source = pool.get("d0")
    assert source is not None
    for _ in range(3):
        assert len(pool.targets(source, 0.0)) == 3
    assert len(compared) == len(set(compared)) == 16 + 3


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_pool_of_less_than_a_token_is_none_to_divide_by(policy: str) -> None:
    """What a node says of itself may be wrong, and then no other request is the worse for it."""
    layer = LayerKv(1, 8, 8, "float32")
    layout = KvLayout((layer, layer), block_size=1, fingerprint="f", groups=((0,), (1,)))
    pool = Pool(policy=find_policy(policy), draw=Random(0))
    for name, num_blocks in (("d1", 1), ("d2", 9)):
        pool.add(dataclasses.replace(info(name, NodeRole.DECODE), layout=layout, num_blocks=num_blocks), 0.0)
    pool.update_load("d1", Load(), 0.0)  # nor does it tell of its blocks
    placement = pool.choose(set(), 0.0, num_tokens=1)
    assert placement is not None
