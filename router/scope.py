"""A request's name, the same in both front ends."""

from __future__ import annotations

import re
import uuid

RETRY_AFTER_S = 1
"""What a client is told to wait that came while there was no room or no node."""

_USABLE = re.compile(r"[!-~]{1,128}")


def usable_request_id(given: str) -> str:
    """The client's id, or a fresh one when it gave none that can stand in a header and a log line."""
    return given if _USABLE.fullmatch(given) else uuid.uuid4().hex
