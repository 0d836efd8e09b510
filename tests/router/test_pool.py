"""Which nodes fit together, and that it is found out once for each pair."""

from __future__ import annotations

import dataclasses

import pytest

from baton.node_info import NodeInfo, NodeRole
from router.placement import compatibility
from router.placement.pool import Pool
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
    assert (pool.mismatched_pairs(), [node.info for node in pool.targets(source, 0.0)]) == ([], [decode])
    pool.add(otherwise(decode), 0.0)
    assert [(p.node_id, d.node_id) for p, d, _ in pool.mismatched_pairs()] == [("p1", "d1")]
    assert pool.targets(source, 0.0) == []
    pool.add(decode, 0.0)
    assert (pool.mismatched_pairs(), [node.info for node in pool.targets(source, 0.0)]) == ([], [decode])
    pool.add(otherwise(prefill), 0.0)
    assert len(pool.mismatched_pairs()) == 2
    pool.remove("p1")
    assert pool.mismatched_pairs() == []


def test_a_node_that_fits_no_other_has_no_partner() -> None:
    pool, prefill, decode = Pool(), info("p1", NodeRole.PREFILL), info("d1", NodeRole.DECODE)
    pool.add(otherwise(prefill), 0.0)
    assert pool.without_partner() == set(), "it waits for a decode node"
    pool.add(decode, 0.0)
    assert pool.without_partner() == {"p1", "d1"}, "no request is answered"
    pool.add(info("p2", NodeRole.PREFILL), 0.0)
    assert pool.without_partner() == {"p1"}
    pool.remove("p2")
    pool.remove("p1")
    assert pool.without_partner() == set(), "a decode node works alone"


def test_an_old_prefill_node_has_no_partner_once_all_decode_nodes_are_new() -> None:
    pool, prefill, decode = Pool(), info("p1", NodeRole.PREFILL), info("d1", NodeRole.DECODE)
    pool.add(prefill, 0.0)
    pool.add(dataclasses.replace(decode, layout=dataclasses.replace(decode.layout, fingerprint="new")), 0.0)
    assert pool.without_partner() == {"p1"}, "a decode node without prefill nodes of its version works alone"


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
