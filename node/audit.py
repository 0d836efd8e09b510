"""What an audit of a node's KV memory contains, and the verdict of its integrity check.

Both run on the engine's thread; `node.auditor` decides when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from baton.audit import OK, KvAudit, KvSlot
from baton.node_info import NodeRole
from engine.block_manager import BlockManager
from engine.holdings import Holding, list_blocks


def verdict(check_integrity: Callable[[], None]) -> str:
    """The failed integrity check in one line, or "ok"."""
    try:
        check_integrity()
    except AssertionError as error:
        return " ".join(str(error).split()) or "an assertion failed"
    return OK


def make_audit(
    role: NodeRole,
    incarnation: str,
    integrity: str,
    idle: bool,
    blocks: BlockManager,
    holdings: Sequence[Holding],
    slots: Sequence[KvSlot],
    now: float,
) -> KvAudit:
    """The role's audit, without a `node_id`. Engine's thread only; takes 0.2 s with 50,000 blocks in use."""
    return KvAudit(
        node_id="",
        incarnation=incarnation,
        role=role,
        integrity=integrity,
        idle=idle,
        num_blocks={state.value: count for state, count in blocks.counts_by_state().items()},
        num_slots=Counter(slot.state for slot in slots),
        holders=tuple(holding.holder(now) for holding in holdings),
        blocks=list_blocks(blocks, holdings, now),
        slots=tuple(slots),
    )
