"""What the router knows of a node: its loads, and what it was given and has not done yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.messages import Load
from baton.node_info import NodeInfo, NodeRole
from baton.table_shape import TableShape
from baton.telemetry.pools import PoolState
from router.placement.rates import FadingMean, Mean, PrefillTime
from router.policies import Candidate
from router.versions import ModelVersion, version_of

Place = tuple[NodeRole, str]
UNKNOWN_HELD_S = 1.0
"""How long requests are expected to generate on a node on which none has ended."""


@dataclass(slots=True)
class Node:
    """A subscribed node, with the work that this router has given it. Its own `load` lags behind by a heartbeat and
    includes other routers' work. Counts are tokens of prompts: `to_prefill` of those not computed yet, `to_decode` of
    requests that generate there. `to_prefill_s`: what the former are expected to take."""

    info: NodeInfo
    load: Load
    loaded_at: float = 0.0
    """When the load came, or the node did: another one follows with each heartbeat."""
    to_prefill: int = 0
    to_decode: int = 0
    num_answers: int = 0
    """Of the requests that generate there, with those that will."""
    num_prompts: int = 0
    to_prefill_s: float = 0.0
    num_promised: int = 0
    """Blocks for the requests that it was given and that have none there yet."""
    num_settling: int = 0
    """Blocks that such requests have got since its last load."""
    waiting_of_others: int = 0
    """Tokens of prompts that wait there for other routers, as of its last load."""
    busy_since: float = 0.0
    """When it is believed to have begun with the first of the prompts that it has."""
    last_placed: int = 0
    """Number of the last placement that gave it a prompt to compute."""
    prefill_time: PrefillTime = field(default_factory=PrefillTime)
    handoff_s: FadingMean = field(default_factory=FadingMean)
    held_s: Mean = field(default_factory=Mean)
    """How long requests have their blocks there, until they end."""
    num_tokens: int = 0
    """Tokens of prompts that it has computed for this router, and tokens that it has generated."""
    drains: bool = False
    """It takes no new work, since an operator or its discovery wants it gone."""
    tables: TableShape = field(init=False)
    """Of its requests' blocks."""
    num_next: int = field(init=False)
    """Blocks of the next tokens of a request."""
    capacity: int = field(init=False)
    """Tokens that its KV pool holds, of long prompts."""
    version: ModelVersion = field(init=False)

    def __post_init__(self) -> None:
        layout = self.info.layout
        self.tables = TableShape(layout.block_size, layout.windows)
        self.num_next = self.tables.width
        self.capacity = max(1, self.info.num_blocks * layout.block_size // max(1, self.tables.num_full))
        self.version = version_of(self.info)

    @property
    def takes_work(self) -> bool:
        return not self.drains and not self.load.draining

    @property
    def place(self) -> Place:
        """Where it runs: the same after a restart."""
        return self.info.role, self.info.address

    @property
    def in_use(self) -> float:
        """The share of its KV pool that is in use, by its own account."""
        return 1 - self.load.num_blocks_free / self.load.num_blocks_total if self.load.num_blocks_total else 0.0

    @property
    def most_tokens(self) -> int:
        """That its KV pool holds, of long prompts, by its own account: nodes' blocks may be of several sizes."""
        return self.load.num_blocks_total * self.info.layout.block_size // max(1, self.tables.num_full)

    @property
    def seats_taken(self) -> tuple[float, int]:
        """How much it generates: by this router's account, which is never late, and by its own."""
        return self.to_decode / self.capacity, self.load.num_running

    @property
    def backlog(self) -> tuple[int, int]:
        """How late the node would start one more prompt. Of two with equal work, the one that got its last prompt
        earlier is further along: a prompt of 1,024 tokens takes 20 to 30 ms, more than the rest of a first token."""
        return self.to_prefill, self.last_placed if self.to_prefill else 0

    def can_hold(self, num_blocks: int) -> bool:
        """Whether it has so many blocks in all, as far as it has said."""
        return not self.load.num_blocks_total or num_blocks <= self.load.num_blocks_total

    def has_room(self, num_blocks: int) -> bool:
        """Whether it has so many blocks free beside those promised, and room for the next block of each request that
        generates, as its own rule for granting has it. A node that is idle gets anything: whether that fits it says
        itself."""
        load = self.load
        taken = self.num_promised + self.num_settling
        if not load.num_blocks_total or not (taken or load.num_running or load.num_waiting):
            return True
        return taken + num_blocks + load.num_running * self.num_next <= load.num_blocks_free

    def queue_s(self, now: float) -> float:
        """Until it would start one more prompt. It is in the midst of the first that it has. What is late already is
        expected to take as long again: the node may be slower than all that is known."""
        others_s = self.prefill_time.predict(self.waiting_of_others) if self.waiting_of_others else 0.0
        if not self.num_prompts:
            return others_s
        first_s = self.to_prefill_s / self.num_prompts
        passed_s = max(0.0, now - self.busy_since)
        return others_s + max(self.to_prefill_s - min(passed_s, first_s), passed_s - self.to_prefill_s)

    def candidate(self, now: float, num_tokens: int, num_held: int) -> Candidate:
        """As a policy sees it for a prompt of so many tokens, of which it holds so many leading blocks. The last token
        of a prompt is always computed."""
        info, load, capacity = self.info, self.load, self.capacity
        num_cached = min(num_held * info.layout.block_size, max(0, num_tokens - 1)) if num_held else 0
        rate = load.prompt_tokens_per_s  # beside what it decodes
        num_uncached = num_tokens - num_cached
        placed, in_use = self.to_decode / capacity, self.in_use
        return Candidate(
            info.incarnation,
            info.node_id,
            self.backlog,
            (self.to_decode, load.num_waiting + load.num_running),
            num_cached,
            self.queue_s(now) if self.num_prompts or self.waiting_of_others else 0.0,
            num_uncached / rate if rate else self.prefill_time.predict(num_uncached),
            self.handoff_s.at(now),
            load.num_running,
            (in_use if in_use > placed else placed) + num_tokens / capacity,
            load.target_itl_s > 0,
            self.held_s.value or UNKNOWN_HELD_S,
        )


def pool_state(nodes: Iterable[Node], num_withheld: int) -> PoolState:
    """The sums over the nodes."""
    nodes = list(nodes)
    loads = [(node.load, node.info.max_num_seqs) for node in nodes]
    capacities: Counter[int] = Counter()
    for node in nodes:
        capacities[node.info.layout.block_size] += node.info.num_blocks
    return PoolState(
        len(loads),
        sum(load.num_waiting for load, _ in loads),
        sum(load.num_running for load, _ in loads),
        sum(num_seats for _, num_seats in loads),
        sum(load.num_blocks_total - load.num_blocks_free for load, _ in loads),
        sum(load.num_blocks_total for load, _ in loads),
        num_withheld if loads else 0,
        capacities,
    )


def num_blocks(node: Node, num_tokens: int, n: int) -> int:
    """That so many tokens of a prompt take there, with those for the next token of each of `n` answers."""
    return node.tables.num_held(num_tokens) + n * node.num_next


def least_blocks(node: Node, num_tokens: int, n: int) -> int:
    """Without which the node refuses so many tokens of a prompt with `n` answers, see `decode_node.reservations`: the
    first answer goes on in the prompt's last block while that is not full. 0 without an answer."""
    begins_a_block = num_tokens % node.tables.block_size == 0
    return node.tables.num_held(num_tokens) + (n - 1 + begins_a_block) * node.num_next if n else 0
