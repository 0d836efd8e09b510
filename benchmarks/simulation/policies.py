"""Routers with each of the placement policies, as a simulation compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from router.core import RouterCore
from router.policies import POLICIES as ALL
from router.policies import Policy

EPOCH = 1


def _router(policy: type[Policy]) -> RouterCore:
    return RouterCore(EPOCH, policy=policy(), draw=Random(0))


POLICIES: Mapping[str, Callable[[], RouterCore]] = {name: partial(_router, policy) for name, policy in ALL.items()}
