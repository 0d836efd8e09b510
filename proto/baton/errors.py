"""All errors that a request can end with, as one tree.

    BatonError
    |-- InvalidRequest          the client's mistake; the same request can never succeed
    |-- Overloaded              no capacity now; retry later
    |-- RequestCancelled        the client cancelled it, or a fence forbids it
    |-- DeadlineExceeded        the request's deadline has passed
    |-- NodeUnavailable         no node, or the node went away
    |-- CacheExhausted          the KV pool cannot hold it
    |-- InternalError           a bug of ours, caught at a request's boundary
    `-- TransferError           the KV cache did not arrive
        |-- LayoutMismatch      the two pools cannot exchange blocks
        |-- TransferTimeout     parts were still missing at the deadline
        `-- PeerLost            the other side died or went silent

Each class defines whether another attempt at the same request may succeed (`retryable`), its HTTP status
(`http_status`) and its gRPC status (`grpc_status`, a name of `grpc.StatusCode`). `code` is its number on the wire.
"""

from __future__ import annotations

from typing import ClassVar

from baton.v1 import common_pb2 as pb


class BatonError(Exception):
    """Root of the tree; never raised itself."""

    code: ClassVar[pb.ErrorCode] = pb.ERROR_CODE_INTERNAL
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    @property
    def code_name(self) -> str:
        """Its code as clients and metrics read it, such as `invalid_request`."""
        return pb.ErrorCode.Name(self.code).removeprefix("ERROR_CODE_").lower()


PARAM_KEY = "error-param"
"""Where the router's trailing metadata over gRPC has an InvalidRequest's `param`."""


class InvalidRequest(BatonError):
    """The client's mistake. `param` names the offending field, if there is one."""

    code = pb.ERROR_CODE_INVALID_REQUEST
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(BatonError):
    """Queues or pools are full. Raised only before the first token."""

    code = pb.ERROR_CODE_OVERLOADED
    retryable = True
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class RequestCancelled(BatonError):
    """The client went away, or a fence forbids the work."""

    code = pb.ERROR_CODE_CANCELLED
    http_status = 499
    grpc_status = "CANCELLED"


class DeadlineExceeded(BatonError):
    code = pb.ERROR_CODE_DEADLINE_EXCEEDED
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class NodeUnavailable(BatonError):
    code = pb.ERROR_CODE_NODE_UNAVAILABLE
    retryable = True
    http_status = 503
    grpc_status = "UNAVAILABLE"


class CacheExhausted(BatonError):
    """More KV blocks were asked for than are free or evictable."""

    code = pb.ERROR_CODE_CACHE_EXHAUSTED
    retryable = True
    http_status = 503
    grpc_status = "RESOURCE_EXHAUSTED"


class InternalError(BatonError):
    """An unexpected exception, converted to an outcome at a request's boundary."""


class TransferError(BatonError):
    code = pb.ERROR_CODE_TRANSFER
    retryable = True
    http_status = 503
    grpc_status = "UNAVAILABLE"


class LayoutMismatch(TransferError):
    """Two nodes' KV blocks differ."""

    code = pb.ERROR_CODE_LAYOUT_MISMATCH


class TransferTimeout(TransferError):
    code = pb.ERROR_CODE_TRANSFER_TIMEOUT


class PeerLost(TransferError):
    code = pb.ERROR_CODE_PEER_LOST


_BY_CODE: dict[int, type[BatonError]] = {
    int(kind.code): kind
    for kind in (
        InvalidRequest,
        Overloaded,
        RequestCancelled,
        DeadlineExceeded,
        NodeUnavailable,
        CacheExhausted,
        InternalError,
        TransferError,
        LayoutMismatch,
        TransferTimeout,
        PeerLost,
    )
}


def from_code(code: int, message: str) -> BatonError:
    """The error that a peer reported. An unknown code (of a newer version) becomes an `InternalError` that names it."""
    kind = _BY_CODE.get(code)
    return kind(message) if kind else InternalError(f"error code {code}: {message}")
