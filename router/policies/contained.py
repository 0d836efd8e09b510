"""Policies of other packages, wrapped so that their failures cost no request."""

from __future__ import annotations

import logging
from dataclasses import replace
from random import Random

from router.policies.base import Option, Options, Policy
from router.policies.least_loaded import LeastLoaded
from router.policies.registry import POLICIES

log = logging.getLogger(__name__)


def contained(policy: Policy) -> Policy:
    """The policy itself or, if it is from another package, a wrapper that contains its failures."""
    return policy if type(policy) in POLICIES.values() else _Contained(policy)


class _Contained(Policy):
    """Chooses as `policy` does. If that fails, the least loaded nodes get the request, since the nodes of any option
    can answer it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.uses_decode_alone = policy.uses_decode_alone
        self.name = policy.name or type(policy).__name__

    def choose(self, options: Options, draw: Random) -> Option:
        prefills, decodes, alone = map(tuple, (options.prefills, options.decodes, options.alone))
        options = replace(options, prefills=prefills, decodes=decodes, alone=alone)  # which the policy cannot change
        try:
            if (option := self._policy.choose(options, draw)) in options:
                return option
            log.error("policy chose what was not offered policy=%s choice=%.200r", self.name, option)
        except Exception:  # code of another package
            log.exception("policy failed policy=%s", self.name)
        return LeastLoaded().choose(options, draw)
