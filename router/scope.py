"""A request's id, made in the same way for both front ends."""

from __future__ import annotations

import os
import re

RETRY_AFTER_S = 1
"""How long a client should wait before it retries, when there was no room or no node."""

REQUEST_ID = "[!-~]{1,128}"
_USABLE = re.compile(REQUEST_ID)


def is_usable_request_id(given: str) -> bool:
    return _USABLE.fullmatch(given) is not None


def usable_request_id(given: str) -> str:
    """The client's id if it can stand in a header and a log line, else a fresh one."""
    return given if is_usable_request_id(given) else draw_request_id()


def draw_request_id() -> str:
    return os.urandom(16).hex()
