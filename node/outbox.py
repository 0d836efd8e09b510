"""The outputs of a node's role, in order, until the shell takes them."""

from __future__ import annotations

from baton.handoff_messages import DecodeToPrefill, PrefillToDecode
from baton.messages import AttemptId, DecodeTarget, Update, UpdateKind
from node.events import CloseSession, Output, ToDecode, ToPrefill


class Outbox:
    """Collects outputs. `epochs` are the routers with a session; messages to others are dropped, since their work ended
    with their sessions."""

    def __init__(self) -> None:
        self.epochs: set[int] = set()
        self._outputs: list[Output] = []

    def to_router(self, attempt_id: AttemptId, kind: UpdateKind) -> None:
        if attempt_id.router_epoch in self.epochs:
            self._outputs.append(Update(attempt_id, kind))

    def to_decode(self, target: DecodeTarget, message: PrefillToDecode) -> None:
        self._outputs.append(ToDecode(target, message))

    def to_prefill(self, peer: str, message: DecodeToPrefill) -> None:
        self._outputs.append(ToPrefill(peer, message))

    def close_session(self, epoch: int, reason: str) -> None:
        if epoch in self.epochs:
            self._outputs.append(CloseSession(epoch, reason))

    def add(self, output: Output) -> None:
        self._outputs.append(output)

    @property
    def is_empty(self) -> bool:
        return not self._outputs

    def take(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs
