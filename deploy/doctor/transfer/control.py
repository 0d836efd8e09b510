"""Messages between the two ends of a self-test: JSON objects, each with its length, over TCP.

Every message has a deadline. With a cluster secret both ends prove that they know it before anything else is said.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

from baton.address import HostPort
from baton.rpc.cluster_secret import NONCE_BYTES, ClusterSecret, is_proof, new_nonce

VERSION = 1
MAX_BYTES = 1 << 20
_PURPOSE = "doctor"
_LENGTH = struct.Struct("<I")


class TestFailed(Exception):
    """The other end cannot be reached, is not what it should be, or says that something failed."""

    __test__ = False  # to pytest its name looks like a test's


class Control:
    """One end of a connection. `deadline`: of `time.monotonic`, for all of it."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.socket = connection
        self.deadline = deadline
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, **message: Any) -> None:
        """Raises TestFailed."""
        data = json.dumps(message).encode()
        try:
            self._hurry()
            self.socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise TestFailed(f"the connection broke: {error}") from None

    def hear(self) -> dict[str, Any]:
        """The next message. Raises TestFailed, also with what it names as an error."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_BYTES:
            raise TestFailed("the other end is no baton doctor")
        try:
            message = json.loads(self._read(length))
        except ValueError:
            raise TestFailed("the other end is no baton doctor") from None
        if not isinstance(message, dict):
            raise TestFailed("the other end is no baton doctor")
        if "error" in message:
            raise TestFailed(f"the other end says: {str(message['error'])[:500]}")
        return message

    def close(self) -> None:
        self.socket.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        try:
            while len(data) < num_bytes:
                self._hurry()
                piece = self.socket.recv(num_bytes - len(data))
                if not piece:
                    raise TestFailed("the other end hung up")
                data += piece
        except TimeoutError:
            raise TestFailed("the other end did not answer in time") from None
        except OSError as error:
            raise TestFailed(f"the connection broke: {error}") from None
        return bytes(data)

    def _hurry(self) -> None:
        self.socket.settimeout(max(0.001, self.deadline - time.monotonic()))


def dial(peer: HostPort, kind: str, secret: ClusterSecret | None, timeout_s: float) -> Control:
    """Connect for a purpose, and prove the secret. Raises TestFailed."""
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection((peer.host, peer.port), timeout_s)
    except OSError as error:
        raise TestFailed(f"{peer} cannot be reached: {error}") from None
    control = Control(connection, deadline)
    try:
        _introduce(control, kind, secret)
    except BaseException:
        control.close()
        raise
    return control


def _introduce(control: Control, kind: str, secret: ClusterSecret | None) -> None:
    nonce = new_nonce()
    control.say(doctor=VERSION, kind=kind, secret=secret is not None, nonce=nonce.hex())
    answer = control.hear()
    if answer.get("doctor") != VERSION:
        raise TestFailed(f"the other end's self-test has version {answer.get('doctor')!r}, this one {VERSION}")
    if secret is not None:
        proofs = secret.proofs(_PURPOSE, "peer", "listener", nonce, _nonce(answer))
        control.say(proof=proofs.caller.hex())
        if not is_proof(_bytes(control.hear(), "proof"), proofs.callee):
            raise TestFailed("the other end does not know the cluster secret")


def admit(control: Control, secret: ClusterSecret | None) -> str:
    """The listener's side; what the connection is for. Raises TestFailed, having said why."""
    hello = control.hear()
    try:
        if hello.get("doctor") != VERSION:
            raise TestFailed(f"a self-test of version {hello.get('doctor')!r} meets one of {VERSION}")
        if bool(hello.get("secret")) != (secret is not None):
            raise TestFailed("only one of the two ends has --cluster-secret-file")
        nonce = new_nonce()
        control.say(doctor=VERSION, nonce=nonce.hex())
        if secret is not None:
            proofs = secret.proofs(_PURPOSE, "peer", "listener", _nonce(hello), nonce)
            if not is_proof(_bytes(control.hear(), "proof"), proofs.caller):
                raise TestFailed("the cluster secret differs between the two ends")
            control.say(proof=proofs.callee.hex())
    except TestFailed as error:
        control.say(error=str(error))
        raise
    return str(hello.get("kind"))


def _nonce(message: dict[str, Any]) -> bytes:
    nonce = _bytes(message, "nonce")
    if len(nonce) != NONCE_BYTES:
        raise TestFailed("the other end sends no nonce")
    return nonce


def _bytes(message: dict[str, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(str(message.get(name)))
    except ValueError:
        raise TestFailed(f"the other end sends no {name}") from None
