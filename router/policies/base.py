"""What a policy sees of the nodes and of a prompt, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


class Candidate(NamedTuple):
    """A node, as a policy sees it for one prompt: a tuple, which is cheap, because each placement makes one for each
    node. `incarnation` identifies the node; `node_id` is its name, which orders nodes that are equal otherwise. Times
    are in seconds.

    backlog, busy: sort keys for how much the node has to compute for other prompts, and how much it has to generate;
    smaller means less work. num_cached: leading tokens of the prompt that its prefix cache holds. queue_s: until it
    would start the prompt. prefill_s: from there to the first token. handoff_s: what a handoff to this decode node
    usually takes after that. num_running: requests that generate there. fill: share of its KV pool that placed requests
    will need. bounds_gaps: it computes prompts without letting a stream wait for longer than its --target-itl. held_s:
    how long requests generate there; in that time, as many blocks as the pool has become free.
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
        """How long until the prompt's first token, if this node computes it."""
        return self.queue_s + self.prefill_s


class Option(NamedTuple):
    """`decode` None: `prefill` is a decode node, which does all the work."""

    prefill: Candidate
    decode: Candidate | None

    @property
    def alone(self) -> Option:
        """The option in which the node that generates does all the work."""
        return Option(self.decode or self.prefill, None)


@dataclass(frozen=True, slots=True)
class Options:
    """What a policy may choose from; there is at least one option. Pairs work together if `fits` is true for them;
    `alone`: decode nodes that may do all the work themselves. `turn` counts placements on nodes of this version;
    `num_tokens`: tokens of the prompt."""

    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    fits: Callable[[Candidate, Candidate], bool]
    alone: Sequence[Candidate] = ()
    turn: int = 0
    num_tokens: int = 0

    def pairs(
        self, prefills: Iterable[Candidate] | None = None, decodes: Sequence[Candidate] | None = None
    ) -> Iterator[Option]:
        """The pairs of these nodes, or of all nodes, in the given order: for each prefill node, its decode nodes."""
        inner = self.decodes if decodes is None else decodes
        for prefill in self.prefills if prefills is None else prefills:
            yield from (Option(prefill, decode) for decode in inner if self.fits(prefill, decode))

    def __contains__(self, option: object) -> bool:
        """Whether it is one of these options: no policy may choose anything else."""
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
    """Chooses nodes for a prompt. It has no state: its choice follows from its arguments. `uses_decode_alone`: it may
    place a prompt on a decode node alone although prefill nodes fit, if the operator allows that (--target-itl)."""

    uses_decode_alone = False
    name = ""
    """The name by which it was found, for reports."""

    @abstractmethod
    def choose(self, options: Options, draw: Random) -> Option:
        """One of the options."""
