"""Policies by name: those of this package, and those of entry points in the group `baton.policies`."""

from __future__ import annotations

from collections.abc import Mapping

from router.plugins import load_plugin
from router.policies.base import Policy
from router.policies.cost import Cost
from router.policies.least_loaded import LeastLoaded
from router.policies.prefix import Prefix
from router.policies.unweighted import RandomChoice, RoundRobin

GROUP = "baton.policies"
POLICIES: Mapping[str, type[Policy]] = {
    "cost": Cost,
    "least-loaded": LeastLoaded,
    "prefix": Prefix,
    "random": RandomChoice,
    "round-robin": RoundRobin,
}


def find_policy(name: str) -> Policy:
    """Raises UnknownPlugin."""
    policy: Policy = load_plugin(GROUP, name, POLICIES, Policy)()  # type: ignore[type-abstract]  # never made
    policy.name = name
    return policy
