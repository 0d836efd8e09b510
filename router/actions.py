"""What the router's state machine has to say, in order, until its shell takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.messages import Abort, Migrate, Prefill
from router.life import RequestEvent


@dataclass(frozen=True, slots=True)
class ToNode:
    incarnation: str
    message: Prefill | Abort | Migrate


class Emit(NamedTuple):
    """For the client of `request_id`: `RequestEnd` comes exactly once, last."""

    request_id: str
    event: RequestEvent


Action = ToNode | Emit


class Outbox:
    """Collects actions for nodes and for clients, whoever of the state machine makes them."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def to_node(self, incarnation: str, message: Prefill | Abort | Migrate) -> None:
        self._actions.append(ToNode(incarnation, message))

    def to_client(self, request_id: str, event: RequestEvent) -> None:
        self._actions.append(Emit(request_id, event))

    def take(self) -> list[Action]:
        if not self._actions:
            return []
        actions, self._actions = self._actions, []
        return actions
