"""Requests that need room on decode nodes, for tests."""

from __future__ import annotations

from baton.messages import Load
from baton.node_info import NodeRole
from baton.sampling import SamplingParams
from router.requests.request_state import RoutedRequest
from router.versions import version_of
from tests.router.rig import RouterRig, info

LONG = 32
"""Tokens, 2 blocks. With one for the answer 3 are needed."""
VERSION = version_of(info("d", NodeRole.DECODE))


def load(rig: RouterRig, num_free: int, name: str = "d1", now: float = 0.0) -> None:
    """One request runs there, so it needs a block besides."""
    rig.core.node_load(name, Load(0, 1, num_free, 100), now)
    rig.collect()


def submit(
    rig: RouterRig, name: str, num_tokens: int = LONG, priority: int = 0, now: float = 0.0, max_tokens: int = 8
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    request = RoutedRequest(name, tuple(range(num_tokens)), 1, params, 60.0, priority=priority, version=VERSION)
    rig.core.submit(request, now)
    rig.collect()


def placed(rig: RouterRig) -> list[str]:
    return [prefill.attempt_id.request_id for _, prefill in rig.prefills]
