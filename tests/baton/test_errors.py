"""What each error means to a client, to the next attempt, and to a peer: a table that changes on purpose only."""

from __future__ import annotations

import pytest

from baton import errors

TABLE = {
    errors.InvalidRequest: (False, 400, "INVALID_ARGUMENT"),
    errors.Overloaded: (True, 429, "RESOURCE_EXHAUSTED"),
    errors.RequestCancelled: (False, 499, "CANCELLED"),
    errors.DeadlineExceeded: (False, 504, "DEADLINE_EXCEEDED"),
    errors.NodeUnavailable: (True, 503, "UNAVAILABLE"),
    errors.CacheExhausted: (True, 503, "RESOURCE_EXHAUSTED"),
    errors.InternalError: (False, 500, "INTERNAL"),
    errors.TransferError: (True, 503, "UNAVAILABLE"),
    errors.LayoutMismatch: (True, 503, "UNAVAILABLE"),
    errors.TransferTimeout: (True, 503, "UNAVAILABLE"),
    errors.PeerLost: (True, 503, "UNAVAILABLE"),
}


@pytest.mark.parametrize("kind", TABLE)
def test_whether_to_try_again_and_what_clients_are_told(kind: type[errors.BatonError]) -> None:
    assert (kind.retryable, kind.http_status, kind.grpc_status) == TABLE[kind]


@pytest.mark.parametrize("kind", TABLE)
def test_a_peers_error_is_the_same_here(kind: type[errors.BatonError]) -> None:
    read = errors.from_code(kind.code, "why")
    assert type(read) is kind
    assert read.message == "why"


def test_an_error_of_a_newer_version_is_our_bug_with_its_code() -> None:
    read = errors.from_code(4711, "why")
    assert type(read) is errors.InternalError
    assert "4711: why" in read.message
