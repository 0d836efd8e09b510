"""`cost`: the option with the least expected time, of the request and of those that it disturbs.

    a pair:        queue of P + prefill of what P lacks + handoff                    + a full D + repeated work
    D alone:       queue of D + prefill of what D lacks, in chunks among its decodes + a full D + disturbed streams

All in seconds; the first two are the time to the first token. The shape is that of Mooncake's Algorithm 1 (queue +
prefill of the uncached rest + transfer: Qin et al. 2024, arXiv 2407.00079) with a price for what a placement does to
others, as Preble has it (Srivatsa et al. 2024, arXiv 2407.00023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from random import Random
from typing import NamedTuple

from router.policies.base import Candidate, Option, Options, Policy

NUM_BEST = 4
"""Of each kind of node that are looked at in pairs: but for what does not fit together, the cost of a pair is the sum
of what each of its nodes costs."""
NEAR = 0.05
"""The second-best option is as good if it costs at most this share more. Several routers that know the same would
otherwise all choose the same node."""
HANDOFF_WEIGHT = 0.5
"""Of a second of handoff, which delays the second token and not the first."""
FULL_S = 0.05
"""Of a decode node whose pool is spoken for; it rises with the square of the share. Each request makes it slower, and
those beyond its pool wait."""
BUSY_S = 1e-6
"""Of each prompt token whose request generates there: with 1,024 of them a step takes some 40 us longer, for all of the
node's streams. It keeps decode nodes in balance."""
DISTURBED = 0.01
"""The price of a second of slower decoding, for each stream that shares steps with a prompt. The target of the node
bounds each gap; this is for the sum of them."""


REPEATED = 1.0
"""Of a second for which a prefill node computes what another one has cached already: prompts that come later wait for
it, and it evicts what they could have used. Without it, a burst of prompts with one beginning has it computed on every
node."""


class Cost(Policy):
    """Of two options that cost about the same, one is drawn at random."""

    uses_decode_alone = True

    def choose(self, options: Options, draw: Random) -> Option:
        price = Prices.of(options)
        prefills = _least(options.prefills, price.prefill)
        decodes = _least(options.decodes, decode_cost)
        priced: list[_Priced] = [
            (prefill_s + decode_s, (prefill.node_id, decode.node_id), Option(prefill, decode))
            for prefill_s, prefill in prefills
            for decode_s, decode in decodes
            if options.fits(prefill, decode)
        ]
        if not priced:
            priced = [(price.option(pair), _names(pair), pair) for pair in options.pairs()]
        if options.alone:
            alone = _least(options.alone, alone_cost)
            priced += [(alone_s, (node.node_id,), Option(node, None)) for alone_s, node in alone]
        if len(priced) > 1:
            priced.sort(key=_PRICE_AND_NAMES)
        near = [option for cost_s, _, option in priced[:2] if cost_s <= (1 + NEAR) * priced[0][0]]
        return near[0] if len(near) == 1 else draw.choice(near)


_Priced = tuple[float, tuple[str, ...], Option]
"""What it costs in seconds, and the names of its nodes, which order what costs the same."""
_PRICE_AND_NAMES = itemgetter(0, 1)


def _least(nodes: Sequence[Candidate], price: Callable[[Candidate], float]) -> list[tuple[float, Candidate]]:
    """The cheapest of them, with their prices, in order; of equal ones the first by name."""
    if len(nodes) == 1:
        return [(price(nodes[0]), nodes[0])]
    ranked = sorted([(price(node), node.node_id, i) for i, node in enumerate(nodes)])
    return [(price_s, nodes[i]) for price_s, _, i in ranked[:NUM_BEST]]


def _names(option: Option) -> tuple[str, ...]:
    return tuple([node.node_id for node in option if node])


class Prices(NamedTuple):
    """What options cost, in seconds, for a prompt of `num_tokens`, of which a prefill node has `most_cached`."""

    num_tokens: int
    most_cached: int

    @classmethod
    def of(cls, options: Options) -> Prices:
        return cls(options.num_tokens, max((node.num_cached for node in options.prefills), default=0))

    def option(self, option: Option) -> float:
        prefill, decode = option
        return self.prefill(prefill) + decode_cost(decode) if decode is not None else alone_cost(prefill)

    def prefill(self, node: Candidate) -> float:
        """What a pair's prefill node adds."""
        num_uncached = self.num_tokens - node.num_cached
        num_repeated = self.most_cached - node.num_cached
        repeated_s = node.prefill_s * num_repeated / num_uncached if num_uncached > 0 else 0.0
        return node.queue_s + node.prefill_s + REPEATED * repeated_s


def alone_cost(node: Candidate) -> float:
    """Of a decode node that does all."""
    disturbed_s = node.prefill_s * node.num_running
    return node.queue_s + node.prefill_s + _full_cost(node) + DISTURBED * disturbed_s


def decode_cost(node: Candidate) -> float:
    """What a pair's decode node adds."""
    return HANDOFF_WEIGHT * node.handoff_s + _full_cost(node)


def _full_cost(node: Candidate) -> float:
    """What exceeds the pool waits until as much has ended of what is there."""
    fill = node.fill
    overfull = fill - 1.0 if fill > 1.0 else 0.0
    return BUSY_S * node.busy[0] + FULL_S * fill * fill + node.held_s * overfull
