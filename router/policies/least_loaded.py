"""`least-loaded`: the prefill node that can start first, and the decode node with the least to generate."""

from __future__ import annotations

from random import Random

from router.policies.base import Option, Options, Policy


class LeastLoaded(Policy):
    """Ignores what is cached where. Of equal nodes it takes the first by name."""

    def choose(self, options: Options, draw: Random) -> Option:
        prefills = sorted(options.prefills, key=lambda node: (node.backlog, node.busy, node.node_id))
        decodes = sorted(options.decodes, key=lambda node: (node.busy, node.node_id))
        alone = sorted(options.alone, key=lambda node: (node.backlog, node.busy, node.node_id))
        return next(options.pairs(prefills, decodes), None) or Option(alone[0], None)
