"""A router's state machine with nodes that say what a test wants them to."""

from __future__ import annotations

from random import Random

from baton.errors import BatonError
from baton.layout import KvLayout, LayerKv
from baton.messages import Abort, Load, Prefill, Tokens, Update
from baton.node_info import GenerationDefaults, NodeInfo, NodeRole
from baton.sampling import SamplingParams
from router.policies import find_policy
from router.requests.actions import Emit, ToNode
from router.requests.core import RouterCore
from router.requests.request_state import FirstToken, RequestEnd, RoutedRequest

LAYOUT = KvLayout((LayerKv(1, 8, 8, "float32"),) * 1, 16, "f")


def info(name: str, role: NodeRole) -> NodeInfo:
    """A node whose name is its incarnation too."""
    return NodeInfo(
        role=role,
        incarnation=name,
        node_id=name,
        address=name,
        served_model_name="m",
        max_model_len=64,
        max_num_seqs=4,
        num_blocks=9,
        layout=LAYOUT,
        endpoints=(),
        tokenizer_digest="",
        chat_template="",
        special_tokens={},
        generation_defaults=GenerationDefaults(),
        vocab_size=9,
    )


class RouterRig:
    """A router with its nodes, and all that it has sent and emitted."""

    def __init__(
        self,
        *names: str,
        with_prefill: bool = True,
        first_token: FirstToken = "prefill",
        max_waiting: int = 100,
        policy: str = "least-loaded",
        migrate_above: float | None = None,
        max_waiting_tokens: int = 0,
    ) -> None:
        draw = Random(0)
        self.core = RouterCore(
            1, with_prefill, first_token, max_waiting, find_policy(policy), draw, migrate_above, max_waiting_tokens
        )
        self.sent: list[ToNode] = []
        self.emitted: list[Emit] = []
        for name in names:
            self.core.node_up(info(name, NodeRole.PREFILL if name[0] == "p" else NodeRole.DECODE), 0.0)
            self.core.node_load(name, Load(), 0.0)  # which says nothing of its blocks: there is room

    def submit(self, n: int = 1) -> Prefill:
        """Request `r`, at time 0."""
        self.core.submit(RoutedRequest("r", (1, 2, 3), n, SamplingParams(max_tokens=8), 60.0), 0.0)
        self.collect()
        return self.prefills[-1][1]

    def say(self, name: str, prefill: Prefill, *kinds: object, now: float = 1.0) -> None:
        for kind in kinds:
            self.core.update(name, Update(prefill.attempt_id, kind), now)  # type: ignore[arg-type]
        self.collect()

    def collect(self) -> None:
        while self.core.actions:
            action = self.core.actions.popleft()
            (self.sent if isinstance(action, ToNode) else self.emitted).append(action)  # type: ignore[arg-type]

    def tick(self, now: float) -> None:
        self.core.tick(now)
        self.collect()

    @property
    def prefills(self) -> list[tuple[str, Prefill]]:
        return [(a.incarnation, a.message) for a in self.sent if isinstance(a.message, Prefill)]

    @property
    def aborted(self) -> set[str]:
        return {a.incarnation for a in self.sent if isinstance(a.message, Abort)}

    @property
    def told(self) -> list[tuple[int, int]]:
        """(sample, token), in the order in which the client got them."""
        events = [e.event for e in self.emitted]
        return [(e.sample, token) for e in events if isinstance(e, Tokens) for token in e.token_ids]

    @property
    def last_word(self) -> RequestEnd:
        (end,) = [e.event for e in self.emitted if isinstance(e.event, RequestEnd)]
        assert self.emitted[-1].event is end
        return end

    @property
    def end(self) -> BatonError | None:
        return self.last_word.error
