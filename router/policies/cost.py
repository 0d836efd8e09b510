"""`cost`: the option with the least expected time for the request and for the requests that it disturbs.

    a pair:        queue of P + prefill of what P lacks + handoff                    + a full D + repeated work
    D alone:       queue of D + prefill of what D lacks, in chunks among its decodes + a full D + disturbed streams

All terms are in seconds; the first two are the time to the first token. The shape is that of Mooncake's Algorithm 1
(queue + prefill of the uncached rest + transfer: Qin et al. 2024, arXiv 2407.00079) with a price for what a placement
does to others, as Preble has it (Srivatsa et al. 2024, arXiv 2407.00023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from random import Random
from typing import NamedTuple

from router.policies.base import Candidate, Option, Options, Policy

NUM_BEST = 4
"""How many nodes of each kind are looked at in pairs. A few are enough, because the cost of a pair is the sum of what
each of its nodes costs, unless they do not fit together."""
NEAR = 0.05
"""An option is as good as the best one if it costs at most this share more and its nodes start no later. One of these
options is drawn at random. Otherwise several routers that know the same would all choose the same nodes. So would one
router for all prompts that find nodes idle, and these would meet again when their conversations go on."""
HANDOFF_WEIGHT = 0.5
"""The price of a second of handoff, which delays the second token and not the first."""
FULL_S = 0.05
"""The price of a decode node whose pool is taken as a whole; it rises with the square of the share that is taken. Each
request makes the node slower, and requests beyond its pool wait."""
BUSY_S = 1e-6
"""The price of each token of the requests that generate on the decode node: with 1,024 more, a step takes some 40 us
longer for all of the node's streams. It keeps decode nodes in balance."""
DISTURBED = 0.01
"""The price of a second of slower decoding, for each stream that shares steps with a prompt. The node's target bounds
each gap; this price is for their sum."""

REPEATED = 4.0
"""The price of computing a prompt although another prefill node has it cached, as a multiple of the lower quartile of
the prefill nodes' queues. Prompts that come later wait for that work, the more of them the longer the queues are. By
queueing theory (M/G/1: Haviv and Ritov 1998), together they wait for about twice the mean queue, and in a rush the mean
queue is about twice that quartile. While a quarter of the nodes are idle, no prompt has to wait, and it is good if one
more node has a popular beginning. In a rush on empty caches, a burst of prompts with a common beginning would otherwise
have it computed on every node."""


class Cost(Policy):
    """Chooses the cheapest option; of several that cost about the same, one at random."""

    uses_decode_alone = True

    def choose(self, options: Options, draw: Random) -> Option:
        price = Prices.of(options)
        prefills = _least(options.prefills, price.prefill, draw)
        decodes = _least(options.decodes, _decode_cost, draw)
        priced = [
            _Priced(prefill_s + decode_s, (prefill.node_id, decode.node_id), Option(prefill, decode), decode_s)
            for prefill_s, prefill in prefills
            for decode_s, decode in decodes
            if options.fits(prefill, decode)
        ]
        if not priced:
            priced = [_Priced(price.option(pair), _names(pair), pair) for pair in options.pairs()]
        if options.alone:
            alone = _least(options.alone, _alone_cost, draw)
            priced += [_Priced(alone_s, (node.node_id,), Option(node, None)) for alone_s, node in alone]
        if len(priced) > 1:
            priced.sort(key=_PRICE_AND_NAMES)
        near = [each.option for each in priced if each.is_as_good_as(priced[0])]
        return near[0] if len(near) == 1 else draw.choice(near)


class _Priced(NamedTuple):
    """What an option costs in seconds; the names of its nodes, which order options of equal cost; and the share of its
    decode node in the cost, if it was computed separately."""

    cost_s: float
    names: tuple[str, ...]
    option: Option
    decode_s: float = 0.0

    def is_as_good_as(self, best: _Priced) -> bool:
        return (
            self.cost_s <= (1 + NEAR) * best.cost_s
            and self.decode_s <= (1 + NEAR) * best.decode_s
            and self.option.prefill.queue_s <= best.option.prefill.queue_s
        )


_PRICE_AND_NAMES = itemgetter(0, 1)


def _least(
    nodes: Sequence[Candidate], price: Callable[[Candidate], float], draw: Random
) -> list[tuple[float, Candidate]]:
    """The cheapest NUM_BEST nodes with their prices, or NUM_BEST drawn at random if more are as good as the
    cheapest."""
    if len(nodes) == 1:
        return [(price(nodes[0]), nodes[0])]
    ranked = sorted([(price(node), node.node_id, i) for i, node in enumerate(nodes)])
    if len(ranked) > NUM_BEST:
        least_s, queue_s = (1 + NEAR) * ranked[0][0], nodes[ranked[0][2]].queue_s
        equal = [each for each in ranked if each[0] <= least_s and nodes[each[2]].queue_s <= queue_s]
        ranked = draw.sample(equal, NUM_BEST) if len(equal) > NUM_BEST else ranked[:NUM_BEST]
    return [(price_s, nodes[i]) for price_s, _, i in ranked]


def _names(option: Option) -> tuple[str, ...]:
    return tuple([node.node_id for node in option if node])


class Prices(NamedTuple):
    """What options cost, in seconds, for a prompt of which some prefill node has `most_cached` tokens cached.
    `repeated_s`: the price of each of these tokens that another prefill node computes again."""

    most_cached: int
    repeated_s: float

    @classmethod
    def of(cls, options: Options) -> Prices:
        most_cached = max([node.num_cached for node in options.prefills], default=0)
        if not most_cached:
            return cls(0, 0.0)
        queues = sorted([node.queue_s for node in options.prefills])
        return cls(most_cached, REPEATED * queues[len(queues) // 4] / max(options.num_tokens, most_cached))

    def option(self, option: Option) -> float:
        prefill, decode = option
        return self.prefill(prefill) + _decode_cost(decode) if decode is not None else _alone_cost(prefill)

    def prefill(self, node: Candidate) -> float:
        """What a pair's prefill node adds to the cost."""
        return node.queue_s + node.prefill_s + self.repeated_s * (self.most_cached - node.num_cached)


def _alone_cost(node: Candidate) -> float:
    """The cost of a decode node that does all the work."""
    disturbed_s = node.prefill_s * node.num_running
    return node.queue_s + node.prefill_s + _full_cost(node) + DISTURBED * disturbed_s


def _decode_cost(node: Candidate) -> float:
    """What a pair's decode node adds to the cost."""
    return HANDOFF_WEIGHT * node.handoff_s + _full_cost(node)


def _full_cost(node: Candidate) -> float:
    """A request that exceeds the pool waits until as much of the node's work has ended."""
    fill = node.fill
    overfull = fill - 1.0 if fill > 1.0 else 0.0
    return BUSY_S * node.busy[0] + FULL_S * fill * fill + node.held_s * overfull
