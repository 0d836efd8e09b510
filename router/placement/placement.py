"""Where a request goes: the nodes, and why."""

from __future__ import annotations

from typing import Literal, NamedTuple

from baton.telemetry.timeline import Estimate
from router.placement.routed_node import Node, num_blocks
from router.policies import Option, Options
from router.policies.cost import Prices


class Placement(NamedTuple):
    """`decode` None: `prefill` is a decode node, which does all the work. `option`: the nodes as the policy saw them,
    among all `options`. `has_room`: whether the node that generates has enough free blocks, see Node.has_room; without
    prefill nodes, requests without room wait on the decode node."""

    prefill: Node
    decode: Node | None
    option: Option
    options: Options
    has_room: bool = True

    def num_blocks(self, num_tokens: int, n: int) -> int:
        """How many blocks the request needs on the node that generates: those for its tokens that are not cached there,
        and one for each of `n` answers that go on there."""
        if not n:
            return 0
        held = self.option.decode or self.option.prefill
        return num_blocks(self.last, num_tokens - held.num_cached, n)

    @property
    def last(self) -> Node:
        """The node that will generate."""
        return self.decode or self.prefill

    @property
    def kind(self) -> Literal["pair", "decode_alone"]:
        return "pair" if self.decode else "decode_alone"

    @property
    def prefill_s(self) -> float:
        """How long the prompt is expected to take, without the queue before it."""
        return self.option.prefill.prefill_s

    @property
    def expected_first_token_s(self) -> float:
        """How long the first token is expected to take on the nodes: on the prefill node, or on the decode node that
        does all the work."""
        return self.option.prefill.start_s

    def estimate(self, policy: str) -> Estimate:
        """What the placement was based on, for the request's timeline."""
        first, last = self.option.prefill, self.option.decode or self.option.prefill
        handoff_s = last.handoff_s if self.decode else 0.0
        return Estimate(policy, self.kind, first.queue_s, first.prefill_s, handoff_s, first.num_cached, last.start_s)

    def __str__(self) -> str:
        """For logs: the nodes, and what the policy knew about them, with times in milliseconds."""
        cost_s = Prices.of(self.options).option(self.option)
        first, last = self.option.prefill, self.option.decode or self.option.prefill
        return (
            f"prefill={first.node_id} decode={last.node_id} cost_ms={1e3 * cost_s:.1f} "
            f"queue_ms={1e3 * first.queue_s:.1f} prefill_ms={1e3 * first.prefill_s:.1f} "
            f"handoff_ms={1e3 * last.handoff_s if self.decode else 0:.1f} cached={first.num_cached} "
            f"decode_cached={last.num_cached} running={last.num_running} fill={last.fill:.2f}"
        )
