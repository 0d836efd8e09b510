"""Which nodes get a request: what the router knows of them, as its policy (`router.policies`) wants to see it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from random import Random

from baton.errors import BatonError, InvalidRequest, NodeUnavailable
from baton.messages import Load
from baton.node_info import NodeInfo, NodeRole
from router.placement.circuit_breakers import CircuitBreakers, Pair
from router.placement.compatibility import Compatibility
from router.placement.placement import Placement
from router.placement.rates import PrefillTime
from router.placement.routed_node import Node, Place, least_blocks, num_blocks
from router.policies import Candidate, Options, Policy
from router.policies.contained import contained
from router.policies.least_loaded import LeastLoaded
from router.versions import ModelVersion, shares

_NONE_HELD: Mapping[str, int] = {}


class TooLargeForNow(NodeUnavailable):
    """The decode nodes that could hold the request are away."""


class Pool:
    """The nodes that a router may use now, by incarnation. `with_prefill`: prefill nodes are meant to be among them.
    `draw`: what the policy draws from. Nodes of different model versions are never paired."""

    def __init__(self, with_prefill: bool = True, policy: Policy | None = None, draw: Random | None = None) -> None:
        self.pair_breakers: CircuitBreakers[Pair] = CircuitBreakers()
        self._node_breakers: CircuitBreakers[Place] = CircuitBreakers()
        self._policy = contained(policy or LeastLoaded())
        self.policy_name = self._policy.name or type(self._policy).__name__
        self._draw = draw or Random()
        self.with_prefill = with_prefill
        self._nodes: dict[str, Node] = {}
        self._compatibility = Compatibility()
        self._prefill_time = PrefillTime()  # of all: what is expected of a new one
        self._num_placed = 0
        self._num_placed_on = dict[str, int]()  # on nodes of each version, by its id
        self._largest: dict[str, Node] = {}  # decode nodes that were ever here, by the name of their model

    def add(self, info: NodeInfo, now: float) -> None:
        """A node that is here already keeps its counts. One that is new counts as empty until its first load: all that
        waits, which is more than it can hold, would else be placed there at once."""
        if node := self._nodes.get(info.incarnation):
            node.info = info
        else:
            empty = Load(num_blocks_free=info.num_blocks, num_blocks_total=info.num_blocks)
            self._nodes[info.incarnation] = Node(info, empty, now, prefill_time=PrefillTime(self._prefill_time))
        self._compatibility.add(info, self.infos())

    def remove(self, incarnation: str) -> None:
        self.pair_breakers.forget(lambda pair: incarnation in pair)
        self._compatibility.forget(incarnation)
        self._nodes.pop(incarnation, None)

    def get(self, incarnation: str) -> Node | None:
        return self._nodes.get(incarnation)

    def infos(self) -> list[NodeInfo]:
        """All nodes, also those that take no new work."""
        return [node.info for node in self._nodes.values()]

    def role(self, role: NodeRole, version: ModelVersion | None = None) -> list[Node]:
        """The nodes of that role, and of that version unless it is None, that take new work."""
        return self._by_role(version)[role is NodeRole.DECODE]

    def _by_role(self, version: ModelVersion | None) -> tuple[list[Node], list[Node]]:
        """The prefill and the decode nodes of that version, of all if it is None, that take new work."""
        by_role: tuple[list[Node], list[Node]] = [], []
        for node in self._nodes.values():
            if node.takes_work and (version is None or node.version == version):
                by_role[node.info.role is NodeRole.DECODE].append(node)
        return by_role

    def unused_pairs(self, now: float) -> list[tuple[NodeInfo, NodeInfo, str]]:
        """The prefill and decode nodes that are not paired, and why: they do not fit, or their circuit breaker is
        open."""
        misfits = self._compatibility.misfits
        every = [(pair, why or self.pair_breakers.why_out(pair, now)) for pair, why in misfits.items()]
        return [(self._nodes[p].info, self._nodes[d].info, why) for (p, d), why in every if why is not None]

    def avoided(self, now: float) -> dict[str, str]:
        """Why the circuit breakers of these nodes, by incarnation, are open."""
        reasons = {name: self._node_breakers.why_out(node.place, now) for name, node in self._nodes.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def without_partner(self) -> dict[str, str]:
        """Why these nodes, by incarnation, get no work: they fit none of the other role. A decode node whose version
        has no prefill nodes works alone."""
        found: set[str] = set()
        has_decodes = bool(self.role(NodeRole.DECODE))
        for prefills, decodes in self._groups().values():
            found.update(node.info.incarnation for node in prefills if has_decodes)
            found.update(node.info.incarnation for node in decodes if prefills)
            for pair in itertools.starmap(_key, itertools.product(prefills, decodes)):
                if self._compatibility.misfits[pair] is None:
                    found.difference_update(pair)
        reasons = [(pair, why) for pair, why in self._compatibility.misfits.items() if why is not None]
        return {name: why for pair, why in reasons for name in pair if name in found}

    # ---- versions ----

    def shares(self, name: str) -> dict[str, float]:
        """How much of a model's requests each version that is served can take, by id."""
        seats = {
            version: tuple(sum(n.info.max_num_seqs for n in nodes) for nodes in group)
            for version, group in self._groups().items()
            if version.name == name and self._why_not(*group) is None
        }
        return shares({version: (prefill, decode) for version, (prefill, decode) in seats.items()})

    def successors(self, version: ModelVersion) -> list[ModelVersion]:
        """The other versions of that name that are served, the one with the largest share first."""
        found = self.shares(version.name)
        others = [other for other in self._groups() if other.id in found and other != version]
        return sorted(others, key=lambda other: -found[other.id])

    def _groups(self) -> dict[ModelVersion, tuple[list[Node], list[Node]]]:
        """The prefill and the decode nodes of each version that take new work."""
        groups: dict[ModelVersion, tuple[list[Node], list[Node]]] = {}
        for node in self._nodes.values():
            if node.takes_work:
                group = groups.setdefault(node.version, ([], []))
                group[node.info.role is NodeRole.DECODE].append(node)
        return groups

    # ---- where to ----

    def choose(
        self,
        avoid: set[str],
        now: float,
        num_tokens: int = 0,
        held: Mapping[str, int] = _NONE_HELD,
        version: ModelVersion | None = None,
        n: int = 1,
    ) -> Placement | None:
        """A pair that fits and works, or a decode node alone, for a prompt of so many tokens, as the policy chooses
        among the nodes of `version`; None: of all.

        Decode nodes that could never hold the request, or have fewer places than answers, are left out if others could;
        nodes in `avoid` are chosen only if there is no other. `held`: how many of the prompt's leading blocks nodes
        hold, by incarnation. `n`: how many answers go on on a decode node; 0: none has more than the token that the
        prompt gives. None: no node can take it at the moment. Raises NodeUnavailable with the reason if the present
        nodes do not fit together, so that waiting would not help; TooLargeForNow if none of them could ever hold the
        request, and InvalidRequest if also no other could that was ever here, or if all have fewer places."""
        every_prefill, every_decode = self._by_role(version)
        if not every_decode:
            return None
        able = [node for node in every_decode if node.can_hold(least_blocks(node, num_tokens, n))]
        seated = [node for node in able if n <= node.info.max_num_seqs]  # needed only for what is handed over
        eligible = seated or able or every_decode
        prefills, decodes, paired = self._candidates(every_prefill, eligible, avoid, now)
        if not paired and every_prefill and (misfit := self._why_not(every_prefill, eligible)):
            raise NodeUnavailable(misfit)
        if paired and not seated:
            raise self._too_many(able, n) if able else self._too_large(every_decode, num_tokens, n)
        roomy = self._with_room(prefills, decodes, now, num_tokens, held, n) if paired else []
        options = self._options(prefills, roomy or decodes, paired, now, num_tokens, held, version)
        option = self._policy.choose(options, self._draw)
        prefill, decode = self._nodes[option.prefill.incarnation], option.decode
        last = None if decode is None else self._nodes[decode.incarnation]
        return Placement(prefill, last, option, options, has_room=bool(roomy) or not paired)

    def _too_large(self, decodes: Sequence[Node], num_tokens: int, n: int) -> BatonError:
        """What to raise, since none of these can hold it: it would wait for one to be idle, and others behind it."""
        largest = max(decodes, key=lambda node: node.most_tokens)
        needed, for_n = least_blocks(largest, num_tokens, n), f" for n {n}" if n > 1 else ""
        why = (
            f"the prompt needs {needed} KV blocks{for_n}, and a decode node has {largest.load.num_blocks_total} at most"
        )
        known = self._largest.get(largest.version.name, largest)
        if known.can_hold(least_blocks(known, num_tokens, n)):
            return TooLargeForNow(f"{why} while {known.info.node_id} is away")
        return InvalidRequest(why, "prompt")

    def _too_many(self, decodes: Sequence[Node], n: int) -> BatonError:
        """What to raise, since none of these may run so many answers at a time."""
        return InvalidRequest(f"n {n} is more than --max-num-seqs {max(d.info.max_num_seqs for d in decodes)}", "n")

    def _with_room(
        self, prefills: list[Node], decodes: list[Node], now: float, num_tokens: int, held: Mapping[str, int], n: int
    ) -> list[Node]:
        """The decode nodes with room for the request, and with seats, if there is one: it would wait for a seat
        elsewhere. None, if none of them works with a prefill node."""

        def needed(node: Node) -> int:
            num_held = held.get(node.info.incarnation, 0) * node.info.layout.block_size
            return num_blocks(node, max(1, num_tokens - num_held), n)

        roomy = [node for node in decodes if not n or node.has_room(needed(node))]
        # By this router's account, and by the node's own, which has other routers' answers too.
        seated = [x for x in roomy if x.num_answers + n <= x.info.max_num_seqs >= x.load.num_running + n]
        for able in (seated, roomy):
            if len(able) == len(decodes) or any(self._works(_key(p, d), now) for p in prefills for d in able):
                return able
        return []

    def _candidates(
        self, prefills: list[Node], decodes: list[Node], avoid: set[str], now: float
    ) -> tuple[list[Node], list[Node], bool]:
        """Those that may get the request, and whether there is a pair among them: as few in `avoid` as possible. A
        decode node whose circuit breaker is open counts as avoided, a prefill node works with none."""
        if len(self._node_breakers):
            prefills = [p for p in prefills if not self._node_breakers.is_out(p.place, now)]
            avoid = avoid | {d.info.incarnation for d in decodes if self._node_breakers.is_out(d.place, now)}

        def split(nodes: list[Node]) -> list[list[Node]]:
            if not avoid:
                return [nodes, []]
            return [[n for n in nodes if (n.info.incarnation in avoid) is avoided] for avoided in (False, True)]

        of_prefill, of_decode = split(prefills), split(decodes)
        for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)):
            if any(self._works(_key(p, d), now) for p in of_prefill[i] for d in of_decode[j]):
                return of_prefill[i], of_decode[j], True
        return [], of_decode[0] or of_decode[1], False

    def _options(
        self,
        prefills: list[Node],
        decodes: list[Node],
        paired: bool,
        now: float,
        num_tokens: int,
        held: Mapping[str, int],
        version: ModelVersion | None,
    ) -> Options:
        def fits(prefill: Candidate, decode: Candidate) -> bool:
            return self._works((prefill.incarnation, decode.incarnation), now)

        first = [node.candidate(now, num_tokens, held.get(node.info.incarnation, 0)) for node in prefills]
        second = [node.candidate(now, num_tokens, held.get(node.info.incarnation, 0)) for node in decodes]
        alone = second if not paired else []
        if paired and self._policy.uses_decode_alone:
            alone = [candidate for candidate in second if candidate.bounds_gaps]
        turn = self._num_placed if version is None else self._num_placed_on.get(version.id, 0)
        return Options(first, second if paired else [], fits, alone, turn, num_tokens)

    def _works(self, pair: Pair, now: float) -> bool:
        return self._compatibility.misfits[pair] is None and not self.pair_breakers.is_out(pair, now)

    # ---- what it was given ----

    def place(self, placement: Placement, num_tokens: int, now: float, n: int = 1) -> None:
        """A prompt of so many tokens goes there. The caller follows with `prefilled` and `ended`, once each. `n`
        answers may go on at the decode node, which else hears nothing of it."""
        node = placement.prefill
        self._num_placed += 1
        self._num_placed_on[node.version.id] = self._num_placed_on.get(node.version.id, 0) + 1
        if not node.num_prompts:
            node.busy_since = now
        node.num_prompts += 1
        node.to_prefill += num_tokens
        node.to_prefill_s += placement.prefill_s
        node.last_placed = self._num_placed
        placement.last.to_decode += num_tokens
        placement.last.num_answers += n
        self._node_breakers.placed(node.place, now)
        if placement.decode and n:
            self._node_breakers.placed(placement.decode.place, now)
            self.pair_breakers.placed(_key(node, placement.decode), now)

    def prefilled(
        self,
        incarnation: str,
        num_tokens: int,
        prefill_s: float,
        now: float,
        num_computed: int | None,
        begun: bool = True,
    ) -> None:
        """That prompt is computed, so many tokens of it; None: it is no longer needed. `prefill_s` as it was placed;
        `begun`: the node has spent time on it."""
        if node := self._nodes.get(incarnation):
            if num_computed is not None:
                for learner in (self._prefill_time, node.prefill_time):  # what is known of all bounds a node's surprise
                    learner.learn(num_computed, now - node.busy_since)
                node.num_tokens += num_computed
            node.num_prompts -= 1
            node.to_prefill -= num_tokens
            node.to_prefill_s = node.to_prefill_s - prefill_s if node.num_prompts else 0.0
            if begun:  # else it is where it was in the prompt before
                node.busy_since = now

    def count_tokens(self, incarnation: str, num_tokens: int) -> None:
        """See `Node.num_tokens`."""
        if node := self._nodes.get(incarnation):
            node.num_tokens += num_tokens

    def num_tokens(self) -> dict[str, int]:
        """See `Node.num_tokens`; by incarnation."""
        return {incarnation: node.num_tokens for incarnation, node in self._nodes.items()}

    def targets(self, source: Node, now: float) -> list[Node]:
        """The decode nodes that can take running requests over from another one. Those whose circuit breakers are open
        are none."""
        return [
            node
            for node in self.role(NodeRole.DECODE, source.version)
            if node is not source
            and not self._node_breakers.is_out(node.place, now)
            and self._compatibility.can_move(source.info, node.info)
        ]

    def will_decode(self, incarnation: str, num_tokens: int, n: int) -> None:
        """Count a prompt of so many tokens as one whose `n` answers are generated there; negative: as one whose answers
        no longer are."""
        if node := self._nodes.get(incarnation):
            node.to_decode += num_tokens
            node.num_answers += n

    def ended(self, incarnation: str, num_tokens: int, n: int, held_s: float | None) -> None:
        """That request no longer generates there, so long after it was placed; None: it never had blocks there."""
        if node := self._nodes.get(incarnation):
            node.to_decode -= num_tokens
            node.num_answers -= n
            if held_s is not None:
                node.held_s.learn(held_s)

    def settle(self, incarnation: str, num_blocks: int) -> None:
        """So many blocks that were promised there are taken, or no longer needed. The node's next load tells which."""
        if num_blocks and (node := self._nodes.get(incarnation)):
            node.num_promised -= num_blocks
            node.num_settling += num_blocks

    def update_load(self, incarnation: str, load: Load, now: float) -> None:
        """A node's load. What it counts beyond the prompts that it has of this router waits for others."""
        if node := self._nodes.get(incarnation):
            node.load, node.loaded_at = load, now
            node.num_settling = 0
            node.waiting_of_others = max(0, load.num_waiting_tokens - node.to_prefill)
            if node.info.role is NodeRole.DECODE:
                known = self._largest.setdefault(node.version.name, node)
                if node.most_tokens > known.most_tokens:
                    self._largest[node.version.name] = node

    def handed_over(self, decode: str, handoff_s: float, now: float) -> None:
        """A handoff to this decode node took that long."""
        if node := self._nodes.get(decode):
            node.handoff_s.learn(handoff_s, now)

    # ---- what failed ----

    def failed(self, incarnation: str, reason: str, now: float) -> None:
        """The node is at fault: it ended a request with an internal error, or it is about to be removed as lost."""
        if node := self._nodes.get(incarnation):
            self._node_breakers.failed(node.place, reason, now)

    def worked(self, incarnation: str) -> None:
        """The node did what was asked of it."""
        if len(self._node_breakers) and (node := self._nodes.get(incarnation)):
            self._node_breakers.worked(node.place)

    # ---- for a person ----

    def why_not_ready(self, version: ModelVersion | None = None) -> str | None:
        """Why no request, or none of that version, would be answered. None: some would."""
        groups = self._groups()
        if version is not None:
            return self._why_not(*groups.get(version, ([], [])))
        reasons = [(version.id, self._why_not(*group)) for version, group in groups.items()]
        if len(reasons) < 2:
            return reasons[0][1] if reasons else self._why_not([], [])
        if any(reason is None for _, reason in reasons):
            return None
        return "; ".join(f"{version_id}: {reason}" for version_id, reason in reasons)

    def _why_not(self, prefills: list[Node], decodes: list[Node]) -> str | None:
        """Why these nodes, of one version, answer no request."""
        if not decodes:
            return "no prefill node and no decode node" if self.with_prefill and not prefills else "no decode node"
        if not prefills or any(self._compatibility.misfits[_key(p, d)] is None for p in prefills for d in decodes):
            return None
        return f"no decode node: {self._compatibility.misfits[_key(prefills[0], decodes[0])]}"

    def _why_apart(self, prefills: list[Node]) -> str:
        """Why the first of them goes with none of the decode nodes that there are, to be appended."""
        decodes = self.role(NodeRole.DECODE)
        return f" ({self._compatibility.misfits[_key(prefills[0], decodes[0])]})" if prefills and decodes else ""

    def why_degraded(self, now: float) -> str | None:
        """Why requests are not answered as intended: decode nodes compute prompts, or certain nodes fail, or
        cannot work with others of their version. None: nothing is missing."""
        groups = self._groups()
        reasons = []
        for version, (prefills, decodes) in groups.items():
            where = f" for {version.id}" if len(groups) > 1 else ""
            if self.with_prefill and not prefills:
                reasons.append(f"no prefill node{where}")
            if not decodes:
                reasons.append(f"no decode node{where}{self._why_apart(prefills)}")
            for node in (*prefills, *decodes):
                if reason := self._node_breakers.why_out(node.place, now):
                    reasons.append(f"{node.info.node_id} is avoided for a while, since it fails: {reason}")
            for pair in itertools.product(prefills, decodes):
                key = _key(*pair)
                if reason := self._compatibility.misfits[key] or self.pair_breakers.why_out(key, now):
                    reasons.append(f"{pair[0].info.node_id} and {pair[1].info.node_id} do not work together: {reason}")
        return "; ".join(reasons) or None


def _key(prefill: Node, decode: Node) -> Pair:
    return prefill.info.incarnation, decode.info.incarnation
