"""The handoff stream between the two nodes of this process.

It has the rules of the streams over gRPC (`node.handoffs.decode_links`, `decode_node.handoffs`): a Reserve opens it, a
role that finds it broken closes it, both roles hear of either, and what a role said before it heard is dropped.
"""

from __future__ import annotations

import logging

from baton.handoff_messages import Reserve
from baton_llm.local.node import LocalNode
from node.events import ClosePeer, FromPeer, PeerClosed, PeerOpened, ToDecode, ToPrefill
from node.handoffs.stream import CONNECT_S, check_hello, routes_to
from node.loop import Turn

log = logging.getLogger(__name__)


class HandoffLink:
    """Between one prefill node and one decode node. On one event loop."""

    def __init__(self, prefill: LocalNode, decode: LocalNode) -> None:
        """Raises TransferError for nodes that cannot exchange blocks."""
        check_hello(prefill.hello, decode.hello)
        self._prefill = prefill
        self._decode = decode
        self._opened: int | None = None  # number of the decode role's PeerOpened; None: closed
        self._closed = 0  # number of the prefill role's last PeerClosed

    def deliver_prefill(self, turn: Turn) -> None:
        """What the prefill node's turn has for the decode node."""
        for output in turn.outputs:
            match output:
                case ToDecode(_, message) if turn.num_handled >= self._closed:
                    if self._opened is None and isinstance(message, Reserve):
                        self._open()
                    if self._opened is not None:
                        self._decode.post(FromPeer(self._prefill.info.incarnation, message))
                case ClosePeer(_, reason):
                    self._close(reason)

    def deliver_decode(self, turn: Turn) -> None:
        """What the decode node's turn has for the prefill node."""
        for output in turn.outputs:
            match output:
                case ToPrefill(_, message) if self._opened is not None and turn.num_handled >= self._opened:
                    self._prefill.post(FromPeer(self._decode.info.incarnation, message))
                case ClosePeer(_, reason):
                    self._close(reason)

    def _open(self) -> None:
        ends = (self._decode, self._prefill), (self._prefill, self._decode)
        for here, there in ends:
            here.transport.connect(there.info.incarnation, routes_to(here.hello, there.hello), CONNECT_S)
        part_blocks = min(self._prefill.hello.part_blocks, self._decode.hello.part_blocks)
        self._opened, _ = (
            here.post(PeerOpened(there.info.incarnation, part_blocks, there.info.layout, there.info.node_id))
            for here, there in ends
        )
        log.info("handoff open prefill=%s decode=%s", self._prefill.info.node_id, self._decode.info.node_id)

    def _close(self, reason: str) -> None:
        if self._opened is None:
            return
        self._opened = None
        for here, there in ((self._decode, self._prefill), (self._prefill, self._decode)):
            here.transport.disconnect(there.info.incarnation)
            self._closed = here.post(PeerClosed(there.info.incarnation, reason))  # the prefill node's comes last
        log.warning("handoff over reason=%s", reason)
