"""What a policy sees of the nodes and of a prompt, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Candidate(NamedTuple):
    """A node, as a policy sees it for one prompt: a tuple, because each placement makes one of each node.
    `incarnation` is its own, `node_id` a name that orders what is equal otherwise. Times are in seconds.

    backlog, busy: in order of work, how much the node has to compute of other prompts, and to generate. num_cached:
    leading tokens of the prompt that its prefix cache holds. queue_s: until it would start the prompt. prefill_s: from
    there to the first token. handoff_s: what a handoff to this decode node usually takes after that. num_running:
    requests that generate there. fill: share of its KV pool that placed requests will need. bounds_gaps: it computes
    prompts without letting a stream wait for longer than its --target-itl. held_s: how long requests generate there, so
    that a pool's worth of them makes room in that time.
    """

    incarnation: str
    node_id: str
    backlog: tuple[int, int] = (0, 0)
    busy: tuple[int, int] = (0, 0)
    num_cached: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    num_running: int = 0
    fill: float = 0.0
    bounds_gaps: bool = False
    held_s: float = 1.0

    @property
    def start_s(self) -> float:
        """Until the prompt's first token, if this node computes it."""
        return self.queue_s + self.prefill_s


class Option(NamedTuple):
    """`decode` None: the decode node in `prefill` does all."""

    prefill: Candidate
    decode: Candidate | None

    @property
    def alone(self) -> Option:
        """The node that generates does all."""
        return Option(self.decode or self.prefill, None)


@dataclass(frozen=True, slots=True)
class Options:
    """The pairs that work together are those that `fits` is true of; `alone`: decode nodes that may do all themselves.
    There is at least one option. `turn` counts placements on nodes of this version; `num_tokens`: of the prompt."""

    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    fits: Callable[[Candidate, Candidate], bool]
    alone: Sequence[Candidate] = ()
    turn: int = 0
    num_tokens: int = 0

    def pairs(
        self, prefills: Iterable[Candidate] | None = None, decodes: Sequence[Candidate] | None = None
    ) -> Iterator[Option]:
        """Of these nodes, or of all, in the order given; the decode nodes' order is the inner one."""
        inner = self.decodes if decodes is None else decodes
        for prefill in self.prefills if prefills is None else prefills:
            yield from (Option(prefill, decode) for decode in inner if self.fits(prefill, decode))

    def __contains__(self, option: object) -> bool:
        """Whether it is one of them: no policy may choose anything else."""
        if not isinstance(option, Option):
            return False
        prefill, decode = option
        if decode is None:
            return prefill in self.alone
        return prefill in self.prefills and decode in self.decodes and self.fits(prefill, decode)

    def __iter__(self) -> Iterator[Option]:
        yield from self.pairs()
        yield from (Option(decode, None) for decode in self.alone)


class Policy(ABC):
    """Has no state: its choice follows from what it is given. `uses_decode_alone`: it may place a prompt on a decode
    node although prefill nodes fit, where the operator allows that (--target-itl)."""

    uses_decode_alone = False
    name = ""
    """The one that it was found by, for reports."""

    @abstractmethod
    def choose(self, options: Options, draw: Random) -> Option:
        """One of the options."""
