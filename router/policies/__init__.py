"""Placement policies: each is one pure function that chooses nodes for a prompt. `--policy` names it."""

from router.policies.base import Candidate, Option, Options, Policy
from router.policies.registry import POLICIES, find_policy

__all__ = ["POLICIES", "Candidate", "Option", "Options", "Policy", "find_policy"]
