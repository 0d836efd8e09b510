"""Proof that both ends of a connection know the cluster's secret, without sending the secret.

caller                      callee
  | -- name, nonce ---------> |
  | <---------- name, nonce - |
  | -- proof ---------------> |   the callee reads nothing else before this
  | <---------------- proof - |   the caller sends nothing else before this

A proof is an HMAC-SHA256 with the secret over the purpose of the connection, the direction of the proof, the names of
both ends and both nonces. It is useless on another connection, and useless when reflected to its sender. A client that
only knows an address gets nothing that helps to guess the secret. Later messages are neither encrypted nor signed: that
is left to TLS.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from baton.errors import NodeUnavailable
from baton.messages import Auth
from baton.regular_files import read_regular

MIN_BYTES = 16
NONCE_BYTES = 32

SESSION = "session"
HANDOFF = "handoff"
DATA = "data"


class NotTrusted(NodeUnavailable):
    """One end has no cluster secret, or a different one."""


class Proofs(NamedTuple):
    """The proofs that the two ends of a connection must send."""

    caller: bytes
    callee: bytes


class ClusterSecret:
    """The secret shared by all processes of a cluster. It is never displayed or logged."""

    def __init__(self, key: bytes) -> None:
        """Raises ValueError for a key that is too short."""
        if len(key) < MIN_BYTES:
            raise ValueError(f"has {len(key)} bytes, and needs {MIN_BYTES} or more")
        self._key = key

    def proofs(self, purpose: str, caller: str, callee: str, caller_nonce: bytes, callee_nonce: bytes) -> Proofs:
        """purpose: what the connection is for. caller, callee: the names of the ends in this exchange."""
        bound = (purpose, caller, callee, caller_nonce, callee_nonce)
        return Proofs(self._mac("caller", *bound), self._mac("callee", *bound))

    def _mac(self, *parts: str | bytes) -> bytes:
        fields = [part.encode() if isinstance(part, str) else part for part in ("baton cluster", *parts)]
        # length-prefixed, so that different fields never give the same text
        text = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        return hmac.digest(self._key, text, "sha256")


def read_secret(path: Path) -> ClusterSecret:
    """The file's content without surrounding white space. Raises ValueError with a readable message."""
    try:
        return ClusterSecret(read_regular(path).strip())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def is_proof(said: bytes, expected: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(said, expected)


Say = Callable[[Auth], Awaitable[object]]
Hear = Callable[[], Awaitable[Any]]
"""The next message of the stream; None at its end."""


async def prove(secret: ClusterSecret, purpose: str, caller: str, say: Say, hear: Hear) -> None:
    """The caller's side of a stream. Raises NotTrusted for a callee that does not know the secret."""
    nonce = new_nonce()
    await say(Auth(caller, nonce))
    challenge = await hear()
    if not isinstance(challenge, Auth) or len(challenge.nonce) != NONCE_BYTES:
        raise NotTrusted("it does not ask for the cluster secret, as a node that has one does")
    proofs = secret.proofs(purpose, caller, challenge.name, nonce, challenge.nonce)
    await say(Auth(proof=proofs.caller))
    answer = await hear()
    if not isinstance(answer, Auth) or not is_proof(answer.proof, proofs.callee):
        raise NotTrusted("it does not know the cluster secret")


async def admit(
    secret: ClusterSecret | None, purpose: str, callee: str, who: str, say: Say, hear: Hear
) -> tuple[str | None, Any]:
    """The callee's side. Returns the caller's proved name (None without a secret) and the first message after that.

    who: the caller, for error messages. Raises NotTrusted.
    """
    first = await hear()
    if not isinstance(first, Auth):
        if secret is not None and first is not None:
            raise NotTrusted(f"this node wants a cluster secret, and {who} has none")
        return None, first
    if secret is None:
        raise NotTrusted(f"{who} has a cluster secret, and this node has none")
    if len(first.nonce) != NONCE_BYTES:
        raise NotTrusted(f"{who} sends no nonce of {NONCE_BYTES} bytes")
    nonce = new_nonce()
    await say(Auth(callee, nonce))
    answer = await hear()
    proofs = secret.proofs(purpose, first.name, callee, first.nonce, nonce)
    if not isinstance(answer, Auth) or not is_proof(answer.proof, proofs.caller):
        raise NotTrusted(f"the cluster secret differs: what {who} has is not this node's")
    await say(Auth(proof=proofs.callee))
    return first.name, await hear()
