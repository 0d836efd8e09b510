"""A client of the raced router: what it is told, checked as it comes, and against what the router has accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.messages import AttemptId, SampleEnd, Tokens
from baton.prompt_logprobs import PromptLogprobs
from router.requests.request_state import (
    AttemptState,
    RequestEnd,
    RequestEvent,
    RequestState,
    RoutedRequest,
)


@dataclass
class Client:
    """`want`: the right answer, by sample. `state`: the router's own. `waits`: the router leaves the first token to the
    decode node."""

    request: RoutedRequest
    want: list[list[int]]
    state: RequestState
    waits: bool
    got: list[list[int]] = field(init=False)
    scores: list[float] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    end: RequestEnd | None = None
    first_token_s: float = 0.0
    _before: dict[AttemptId, dict[int, int]] = field(
        default_factory=dict
    )  # tokens accepted of each sample, at its start

    def __post_init__(self) -> None:
        self.got = [[] for _ in self.want]

    def take(self, event: RequestEvent, now: float) -> None:
        assert self.end is None, "something came after the end"
        match event:
            case PromptLogprobs() as piece:
                assert not any(self.got), "logprobs of the prompt came after a token"
                assert piece.first_index == 1 + len(self.scores), "logprobs of the prompt are missing or repeated"
                self.scores += [entry.logprob for entry in piece]
                tokens = self.request.prompt_tokens[1 : 1 + len(self.scores)]
                assert self.scores == [-float(token) for token in tokens], "logprobs are those of other tokens"
            case Tokens(sample, _, token_ids, _):
                if self.request.sampling.num_prompt_logprobs is not None:
                    assert len(self.scores) == len(self.request.prompt_tokens) - 1, "a token came too early"
                assert sample not in self.ended, "a token came after its sample's end"
                assert sample not in self.stopped, "a token came after its sample was stopped"
                if not any(self.got):
                    self.first_token_s = now - self.state.arrived
                self.got[sample] += token_ids
                have = self.got[sample]
                assert have == self.want[sample][: len(have)], "a token is wrong, missing or repeated"
            case SampleEnd(sample, _, _):
                assert sample not in self.ended, "a sample ended twice"
                assert self.got[sample] == self.want[sample], "a sample ended early"
                self.ended.add(sample)
            case RequestEnd(error, timings):
                self.end = event
                if error is None:
                    assert self.ended | self.stopped == set(range(self.request.n))
                for sample in set(range(self.request.n)) - self.stopped:
                    assert self.got[sample] == self.state.samples[sample].tokens, "the end came before accepted tokens"
                assert timings.first_token_s == self.first_token_s

    def check(self) -> None:
        """Nothing is kept from it but what waits for a decode node; and that is."""
        if self.end is not None:
            return
        working = {s.index: attempt for attempt in self.state.attempts.values() for s in attempt.unfinished}
        unplaced = {s.index for task in self.state.unplaced for s in task.samples if not s.ended}
        for sample in self.state.samples:
            attempt, have, told = working.get(sample.index), len(sample.tokens), len(self.got[sample.index])
            if sample.index in self.stopped or (self.waits and sample.index in unplaced):
                continue
            if not self.waits or not attempt or attempt.state is AttemptState.DECODING:
                assert told == have, "accepted tokens are kept back for no reason"
            else:
                before = self._before.setdefault(attempt.id, {s.index: len(s.tokens) for s in attempt.samples})
                assert told <= before[sample.index], "a token did not wait for the decode node"
