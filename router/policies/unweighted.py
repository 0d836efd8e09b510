"""`round-robin` and `random`: every pair gets its share, whatever its load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from router.policies.base import Candidate, Option, Options, Policy


class RoundRobin(Policy):
    """Each placement takes the next node of each kind, by name. When the pairs would begin to repeat, decode nodes
    shift by one, so that every pair gets its turn."""

    def choose(self, options: Options, draw: Random) -> Option:
        turn = options.turn
        shift = turn // max(1, math.lcm(len(options.prefills), len(options.decodes)))
        prefills, decodes = _from(options.prefills, turn), _from(options.decodes, turn + shift)
        return next(options.pairs(prefills, decodes), None) or Option(_from(options.alone, turn)[0], None)


class RandomChoice(Policy):
    def choose(self, options: Options, draw: Random) -> Option:
        prefills, decodes, alone = (
            draw.sample(list(nodes), len(nodes)) for nodes in (options.prefills, options.decodes, options.alone)
        )
        return next(options.pairs(prefills, decodes), None) or Option(alone[0], None)


def _from(nodes: Sequence[Candidate], turn: int) -> list[Candidate]:
    """All nodes by name, beginning with the one whose turn it is."""
    ordered = sorted(nodes, key=lambda node: node.node_id)
    first = turn % len(ordered) if ordered else 0
    return ordered[first:] + ordered[:first]
