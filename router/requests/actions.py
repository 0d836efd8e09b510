"""The actions of the router's state machine, kept in order until its shell takes them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.messages import Abort, Migrate, Prefill
from router.requests.request_state import RequestEvent


class ToNode(NamedTuple):
    """`cause`: what this attempt follows; empty: it is the request's first, or no attempt."""

    incarnation: str
    message: Prefill | Abort | Migrate
    cause: str = ""


class Emit(NamedTuple):
    """For the client of `request_id`: `RequestEnd` comes exactly once, last."""

    request_id: str
    event: RequestEvent


Action = ToNode | Emit


class Outbox:
    """Collects actions for nodes and for clients, whoever of the state machine makes them. `actions`: those that are
    still to be carried out, the next one first; the shell removes them."""

    def __init__(self) -> None:
        self.actions: deque[Action] = deque()

    def to_node(self, incarnation: str, message: Prefill | Abort | Migrate, cause: str = "") -> None:
        self.actions.append(ToNode(incarnation, message, cause))

    def to_client(self, request_id: str, event: RequestEvent) -> None:
        self.actions.append(Emit(request_id, event))
