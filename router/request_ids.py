"""Ids of requests: those that clients give and those that are drawn, the same for both front ends."""

from __future__ import annotations

import os
import re

REQUEST_ID = "[!-~]{1,128}"
_USABLE = re.compile(REQUEST_ID)


def is_usable_request_id(given: str) -> bool:
    return _USABLE.fullmatch(given) is not None


def usable_request_id(given: str) -> str:
    """The client's id if it can stand in a header and a log line, else a fresh one."""
    return given if is_usable_request_id(given) else draw_request_id()


def draw_request_id() -> str:
    return os.urandom(16).hex()
