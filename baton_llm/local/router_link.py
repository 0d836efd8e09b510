"""The session between the router and a node of this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from baton.messages import Abort, Migrate, Prefill, Update
from baton_llm.local.node import LocalNode
from node.events import (
    BlocksChanged,
    BlocksHeld,
    CloseSession,
    Output,
    SessionLost,
    SessionOpened,
)
from node.kv_events.feed import KvFeed
from node.loop import Turn
from router.nodes.dispatcher import Dispatcher

log = logging.getLogger(__name__)


class RouterLink:
    """Open from `open` on: a session that the node ends is followed by the next. On the dispatcher's event loop."""

    def __init__(self, node: LocalNode, dispatcher: Dispatcher, epoch: int) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._epoch = epoch
        self._opened = 0  # number of the SessionOpened
        self._blocks = KvFeed(max_backlog=sys.maxsize)

    def open(self) -> None:
        self._opened = self._node.post(SessionOpened(self._epoch))
        self._blocks = KvFeed(max_backlog=sys.maxsize)
        self._dispatcher.node_up(self._node.info, self._send)

    def lose(self, reason: str) -> None:
        self._node.post(SessionLost(self._epoch))
        self._dispatcher.node_lost(self._node.info.incarnation, reason)

    def deliver(self, turn: Turn) -> None:
        """What the node's turn has for the router; outputs for an earlier session are dropped."""
        incarnation = self._node.info.incarnation
        self._dispatcher.handle_node_message(incarnation, turn.load)
        if turn.num_handled < self._opened:
            return
        updates = tuple(output for output in turn.outputs if isinstance(output, Update))
        if updates:
            self._dispatcher.handle_node_message(incarnation, updates)
        self._deliver_blocks(turn.outputs)
        for output in turn.outputs:
            if isinstance(output, CloseSession):
                log.warning("session over node_id=%s reason=%s", self._node.info.node_id, output.reason)
                self.lose(output.reason)
                self.open()

    def _deliver_blocks(self, outputs: Sequence[Output]) -> None:
        """What the prefix cache holds: all of it at once, since the router always reads."""
        for output in outputs:
            match output:
                case BlocksHeld(_, hashes):
                    self._blocks.snapshot(hashes)
                case BlocksChanged(changes):
                    self._blocks.changed(changes)
        while not self._blocks.is_empty:
            self._dispatcher.handle_node_message(self._node.info.incarnation, self._blocks.take())

    def _send(self, message: Prefill | Abort | Migrate) -> None:
        self._node.post(message)
