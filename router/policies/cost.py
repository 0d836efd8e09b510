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
"""An option is as good as the best if no part of it starts later and it costs at most this share more. One of them is
drawn: several routers that know the same would otherwise all choose the same nodes, and so would one router for all
prompts that find nodes idle, which then meet again when a conversation goes on."""
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

REPEATED = 4.0
"""The price of a prompt that is computed although another prefill node has it cached, in queues: the one that is longer
on three of four prefill nodes. Prompts that come later wait for that work, the more of them the longer the queues are;
by the theory of queues (M/G/1: Haviv and Ritov 1998) about twice the mean queue all together, which in a rush is twice
that quartile. While a quarter of the nodes are idle nobody need wait, and one more node with a popular beginning is
welcome. In a rush on empty caches, a burst of prompts with one beginning would have it computed on every node."""


class Cost(Policy):
    """Of options that cost about the same, one is drawn at random."""

    uses_decode_alone = True

    def choose(self, options: Options, draw: Random) -> Option:
        price = Prices.of(options)
        prefills = _least(options.prefills, price.prefill, draw)
        decodes = _least(options.decodes, decode_cost, draw)
        priced = [
            _Priced(prefill_s + decode_s, (prefill.node_id, decode.node_id), Option(prefill, decode), decode_s)
            for prefill_s, prefill in prefills
            for decode_s, decode in decodes
            if options.fits(prefill, decode)
        ]
        if not priced:
            priced = [_Priced(price.option(pair), _names(pair), pair) for pair in options.pairs()]
        if options.alone:
            alone = _least(options.alone, alone_cost, draw)
            priced += [_Priced(alone_s, (node.node_id,), Option(node, None)) for alone_s, node in alone]
        if len(priced) > 1:
            priced.sort(key=_PRICE_AND_NAMES)
        near = [each.option for each in priced if each.is_as_good_as(priced[0])]
        return near[0] if len(near) == 1 else draw.choice(near)


class _Priced(NamedTuple):
    """What an option costs in seconds, the names of its nodes, which order what costs the same, and what its decode
    node adds to the price, if that is known."""

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
    """The cheapest of them, with their prices; some, drawn at random, if too many are as good as the first."""
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
    """What options cost, in seconds, for a prompt of which a prefill node has `most_cached` tokens. `repeated_s`: of
    each of them that another prefill node computes once more."""

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
        return self.prefill(prefill) + decode_cost(decode) if decode is not None else alone_cost(prefill)

    def prefill(self, node: Candidate) -> float:
        """What a pair's prefill node adds."""
        return node.queue_s + node.prefill_s + self.repeated_s * (self.most_cached - node.num_cached)


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
