"""Beam search for one request: which of its sequences go on, and the outputs that it has found.

    each live sequence's step gives its most likely next tokens  ->  when all have: the best beams become its sequences

The sequences of a group run as others do, but wait after each step until all have taken theirs. Those that come from
one parent share its blocks. Scores and the treatment of EOS are vLLM's (vllm/beam_search.py): the cumulative logprob
divided by the length of prompt and output, without an EOS, to the power of `length_penalty`. As there, it ends at
`max_tokens`, or when no beam is left that has not ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from baton.messages import AttemptId, TokenLogprobs
from baton.sampling import FinishReason, SamplingParams

CANDIDATES_PER_BEAM = 2
"""For each beam, this many times the width next tokens are considered. Even if half of them are an EOS of some beam,
the others still fill the width."""

_serials = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Beam:
    """An output, and how likely it is. `logprobs`: of each token, if they were asked for. `finish`: None while it
    goes on."""

    tokens: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None


class Member(Protocol):
    """What a search needs to know about a sequence."""

    num_computed_tokens: int

    @property
    def num_tokens(self) -> int: ...


M = TypeVar("M", bound=Member)


class BeamGroup(Generic[M]):
    """The beams of one request. Engine's thread only. `members`: the sequences of the beams that go on; the engine
    replaces them at each `advance`. `serial`: tells it from other groups that came at the same time."""

    def __init__(
        self, attempt_id: AttemptId, num_prompt_tokens: int, sampling: SamplingParams, eos_token_ids: Iterable[int]
    ) -> None:
        self.attempt_id = attempt_id
        self.serial = next(_serials)
        self.members: dict[M, Beam] = {}
        self._sampling = sampling
        self._num_prompt_tokens = num_prompt_tokens
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._next: dict[M, TokenLogprobs] = {}
        self._ended: list[Beam] = []  # the best ones, best first

    @property
    def width(self) -> int:
        return self._sampling.beam_width

    @staticmethod
    def sampling_of(sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters of the beams' sequences: only the logprobs count, not the choices."""
        num_logprobs = max(sampling.num_logprobs, CANDIDATES_PER_BEAM * sampling.beam_width)
        return replace(sampling, num_logprobs=num_logprobs)

    def record(self, member: M, logprobs: TokenLogprobs) -> None:
        """Record a member's most likely next tokens, from its last step. After a preemption, this replaces what was
        recorded before."""
        self._next[member] = logprobs

    @property
    def is_complete(self) -> bool:
        """Whether all members have taken their step, and still have their KV."""
        return all(m in self._next and m.num_computed_tokens == m.num_tokens for m in self.members)

    def advance(self, most_tokens: int) -> list[tuple[M, Beam]]:
        """Choose the next beams, each with the member that it continues; empty: the search has ended. `is_complete`
        must hold. most_tokens: how long prompt and output may become together."""
        candidates: list[tuple[M, Beam]] = []
        for member, beam in self.members.items():
            for token, logprob in self._next[member].top[: CANDIDATES_PER_BEAM * self.width]:
                extended = self._extended(beam, token, logprob, self._next[member])
                if extended.finish is None:
                    candidates.append((member, extended))
                else:
                    self._ended.append(extended)
        candidates.sort(key=lambda candidate: -candidate[1].cumulative_logprob)
        going_on = candidates[: self.width]
        self.members, self._next = {}, {}
        if going_on and self._is_last(going_on[0][1], most_tokens):
            self._ended += [_cut(beam) for _, beam in going_on]
            going_on = []
        self._ended = sorted(self._ended, key=self.score, reverse=True)[: self.width]
        return going_on

    @property
    def best(self) -> list[Beam]:
        """The beams that have ended, best first."""
        return self._ended

    def score(self, beam: Beam) -> float:
        length = self._num_prompt_tokens + len(beam.tokens) - (beam.tokens[-1] in self._eos_token_ids)
        return float(beam.cumulative_logprob / length**self._sampling.length_penalty)

    def _extended(self, beam: Beam, token: int, logprob: float, scored: TokenLogprobs) -> Beam:
        stops = token in self._sampling.stop_token_ids
        ends = token in self._eos_token_ids or stops
        k = self._sampling.num_logprobs
        return Beam(
            (*beam.tokens, token),
            beam.cumulative_logprob + logprob,
            (*beam.logprobs, TokenLogprobs(logprob, scored.top[:k])) if k >= 0 else (),
            FinishReason.STOP if ends else None,
            token if stops and token not in self._eos_token_ids else None,
        )

    def _is_last(self, beam: Beam, most_tokens: int) -> bool:
        num_tokens = len(beam.tokens)
        return num_tokens >= self._sampling.max_tokens or self._num_prompt_tokens + num_tokens >= most_tokens


def _cut(beam: Beam) -> Beam:
    return Beam(beam.tokens, beam.cumulative_logprob, beam.logprobs, FinishReason.LENGTH)
