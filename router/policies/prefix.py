"""`prefix`: the nodes that already hold most of the prompt, whatever their load; of equal ones the least loaded."""

from __future__ import annotations

from random import Random

from router.policies.base import Option, Options, Policy


class Prefix(Policy):
    def choose(self, options: Options, draw: Random) -> Option:
        prefills = sorted(options.prefills, key=lambda node: (-node.num_cached, node.backlog, node.busy, node.node_id))
        decodes = sorted(options.decodes, key=lambda node: (-node.num_cached, node.busy, node.node_id))
        alone = sorted(options.alone, key=lambda node: (-node.num_cached, node.backlog, node.busy, node.node_id))
        return next(options.pairs(prefills, decodes), None) or Option(alone[0], None)
