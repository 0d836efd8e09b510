"""The router of a simulation, with a placement policy."""

from __future__ import annotations

from random import Random

from router.policies import POLICIES as ALL
from router.requests.core import RouterCore
from router.requests.request_state import FirstToken

EPOCH = 1


def make_router(policy: str, num_prefill: int = 1, first_token: FirstToken = "prefill") -> RouterCore:
    return RouterCore(EPOCH, num_prefill > 0, first_token, policy=ALL[policy](), draw=Random(0))
