"""A request's id, made in the same way for both front ends."""

from __future__ import annotations

import re
import uuid

RETRY_AFTER_S = 1
"""How long a client should wait before it retries, when there was no room or no node."""

_USABLE = re.compile(r"[!-~]{1,128}")


def usable_request_id(given: str) -> str:
    """The client's id if it can stand in a header and a log line, else a fresh one."""
    return given if _USABLE.fullmatch(given) else uuid.uuid4().hex
