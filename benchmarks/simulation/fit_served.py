"""How much longer steps take in nodes that serve than in their engine alone, and how they vary.

A pair of nodes gets few requests, at random times, of which most are alone: a machine that was idle is slower at first
than one that is kept busy. What first tokens and gaps take longer than the engine's steps say is added to the profile's
costs. How they differ from that becomes the profile's spread: on a CPU, the threads of a node share cores with one
another, with other nodes, with the router and with the client.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.harness.cluster import running_cluster
from benchmarks.harness.http_stream import Connection, Streamed
from benchmarks.harness.load import Load, Prompts
from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.policies import make_router
from deploy.bench.trace import BLOCK_TOKENS, Entry
from engine.simulated.profile import Profile, Spread, load_profile
from engine.step_size import StepSize

US = 1e6
OUTPUT_LEN = 32
NUM_WARM_UP = 4
NUM_FACTORS = 50

Answers = dict[int, list[Streamed]]
"""By the length of the prompt."""


async def serve(up: str, input_lens: Sequence[int], count: int, per_s: float, seed: int) -> Answers:
    """Start a cluster with these flags, and send so many requests of each length. Raises RequestFailed if one
    fails."""
    async with running_cluster(up) as addresses:
        async with Connection(addresses.http) as connection:
            prompts = await Prompts.of(connection, seed)
        answers: Answers = {}
        for length in input_lens:
            load = Load(addresses.http, prompts, length, OUTPUT_LEN)
            await load.many(NUM_WARM_UP, 1)
            answers[length] = _without_queue(await load.arriving(count, per_s, seed + length))
        return answers


def _without_queue(streams: Sequence[Streamed]) -> list[Streamed]:
    """Those whose prompt was computed while there was no other, as simulations have queues of their own. Raises
    ValueError if there are none."""

    def wait_together(one: Streamed, other: Streamed) -> bool:
        return one is not other and other.sent < one.arrivals[0] and one.sent < other.arrivals[0]

    found = [one for one in streams if not any(wait_together(one, other) for other in streams)]
    if not found:
        raise ValueError("no prompt was alone: the requests come too fast")
    return found


@dataclass(frozen=True, slots=True)
class Served:
    """What to add to the costs of an engine alone, in microseconds, and the spread of their sum. per_adopted_seq_us:
    see DecodeCost."""

    step_us: float
    per_adopted_seq_us: float
    prompt_us: float
    per_prompt_token_us: float
    spread: Spread

    @classmethod
    def of(cls, profile_name: str, answers: Answers) -> Served:
        """profile_name: of the engine alone."""
        profile = load_profile(profile_name)
        alone = {length: _alone(profile_name, length) for length in answers}
        step_us, step = _decodes(profile, answers)
        first_gaps = [
            stream.first_gap_s - (times[1] - times[0])
            for length, (_, *times) in alone.items()
            for stream in answers[length]
        ]
        adopted_us = max(0.0, US * statistics.median(first_gaps) - step_us)
        prompts_us, prompt_step = _prompts(profile, alone, answers)
        return cls(step_us, adopted_us, *prompts_us, Spread(step=step, prompt_step=prompt_step))

    def added_to(self, decodes: Sequence[float], prompts: Sequence[float]) -> tuple[list[float], list[float]]:
        """The costs of steps without and with prompt tokens, see `fit` in `fit_profile`."""
        constant, per_seq, per_context_token, per_prompt_token, *rest = prompts
        added = [constant + self.prompt_us, per_seq, per_context_token, per_prompt_token + self.per_prompt_token_us]
        return [decodes[0] + self.step_us, *decodes[1:]], added + rest

    def __str__(self) -> str:
        tenths = [round(spread[len(spread) * 9 // 10], 2) for spread in (self.spread.step, self.spread.prompt_step)]
        prompts = f"{self.prompt_us:.0f} and {self.per_prompt_token_us:.1f} a token"
        return (
            f"us that a step takes longer: {self.step_us:.0f}, {self.per_adopted_seq_us:.0f} for a sequence that was "
            f"handed over, {prompts} with prompts; one in ten takes {tenths[0]} and {tenths[1]} times as long"
        )


def _decodes(profile: Profile, answers: Answers) -> tuple[float, tuple[float, ...]]:
    """What a step takes longer, in microseconds, and the factors. The first gap has the handoff in it."""
    took, expected = list[float](), list[float]()
    for length, streams in answers.items():
        for stream in streams:
            for number, gap in enumerate(stream.between_tokens_s[1:], 1):
                took.append(gap)
                expected.append(profile.step_s(StepSize(1, length + number + 1)))
    more = max(0.0, statistics.median(a - b for a, b in zip(took, expected, strict=True)))
    return US * more, _factors([a / (b + more) for a, b in zip(took, expected, strict=True)])


def _prompts(
    profile: Profile, alone: Mapping[int, Sequence[float]], answers: Answers
) -> tuple[tuple[float, float], tuple[float, ...]]:
    """What a step with a prompt takes longer, in microseconds, and for each token; and the factors."""
    steps = {length: profile.step_s(StepSize(1, 0, length, length * length)) for length in answers}
    others = {length: alone[length][1] - step for length, step in steps.items()}
    medians = [
        statistics.median(stream.first_token_s for stream in answers[length]) - others[length] - steps[length]
        for length in answers
    ]
    per_token, constant = np.polyfit(list(answers), medians, 1) if len(answers) > 1 else (0.0, medians[0])
    if per_token < 0 or constant < 0:
        per_token, constant = 0.0, max(0.0, statistics.median(medians))
    factors = [
        (stream.first_token_s - others[length]) / (steps[length] + constant + per_token * length)
        for length, streams in answers.items()
        for stream in streams
    ]
    return (US * float(constant), US * float(per_token)), _factors(factors)


def _alone(profile_name: str, length: int) -> list[float]:
    """When a simulated pair of nodes that has nothing else to do gets such a prompt, and when two tokens come."""
    entry = Entry(0.0, length, 2, tuple(range(-(-length // BLOCK_TOKENS))))
    (answer,) = Fleet(1, 1, profile_name, partial(make_router, "cost")).replay([entry])
    return [answer.arrived, *answer.token_times]


def _factors(all_of_them: Sequence[float]) -> tuple[float, ...]:
    """So many that they stand for all, none of them negative."""
    places = (np.arange(NUM_FACTORS) + 0.5) / NUM_FACTORS
    return tuple(max(0.0, float(value)) for value in np.quantile(all_of_them, places))
