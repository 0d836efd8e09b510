"""An engine on a model that counts, for the tests of the engine's rules."""

from __future__ import annotations

import array
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from baton.messages import AttemptId
from baton.prompt_logprobs import PromptLogprobs
from baton.sampling import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.step import Begun, Choice, Chunk, StepResult

SIZES = EngineConfig(num_blocks=33, max_model_len=64, vocab_size=100, eos_token_ids=(1, 2), block_size=4)
_ids = itertools.count()


@dataclasses.dataclass
class Launched:
    choices: list[list[Choice]]
    running: bool = False
    scored: list[tuple[Sequence, PromptLogprobs]] = dataclasses.field(default_factory=list)

    def is_done(self) -> bool:
        return not self.running

    def num_layers_done(self) -> int:
        return 1

    def wait(self) -> list[list[Choice]]:
        return self.choices

    def prompt_logprobs(self) -> list[tuple[Sequence, PromptLogprobs]]:
        return self.scored


def piece_of(chunk: Chunk) -> PromptLogprobs:
    """What a model that finds a token less likely the higher it is says of the prompt's tokens."""
    about = range(chunk.scored_positions.start + 1, chunk.scored_positions.stop + 1)
    tokens = [chunk.sequence.prompt_tokens[index] for index in about]
    own = array.array("f", [-float(token) for token in tokens]).tobytes()
    ranks = array.array("I", [token + 1 for token in tokens]).tobytes()
    return PromptLogprobs(about.start, 0, own, ranks)


class Counting:
    """A model that says 10, 11, 12, ... as the outputs of every sample, and remembers its batches."""

    only_launches = True

    waited_s = 0.0

    def __init__(self) -> None:
        self.batches: list[list[Chunk]] = []
        self.copies: list[tuple[int, int]] = []
        self.forgotten: list[Sequence] = []
        self.steps: list[Launched] = []
        self.slow = False  # what is launched now is done when `running` says so

    def launch(self, chunks: Iterable[Chunk], begun: Begun = lambda waited_s: None) -> Launched:
        chunks = list(chunks)
        begun(self.waited_s)
        self.batches.append(chunks)
        choices = [Choice(10 + chunk.end - len(chunk.sequence.prompt_tokens)) for chunk in chunks]
        step = Launched(
            [[choice] * len(c.sequence.samples) * c.samples_token for c, choice in zip(chunks, choices, strict=True)],
            running=self.slow,
            scored=[(chunk.sequence, piece_of(chunk)) for chunk in chunks if chunk.scored_positions],
        )
        self.steps.append(step)
        return step

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.copies += pairs


def make(**sizes: Any) -> tuple[Engine, Counting]:
    model: Any = Counting()
    return Engine(dataclasses.replace(SIZES, **sizes), model), model


def sequence(num_tokens: int = 5, *, samples: int = 1, first: int = 50, **kwargs: object) -> Sequence:
    params = {name: kwargs.pop(name) for name in list(kwargs) if name in SamplingParams.__dataclass_fields__}
    prompt = tuple(range(first, first + num_tokens))
    sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
    number = next(_ids)
    kwargs.setdefault("arrived_s", float(number))
    return Sequence(AttemptId(1, str(number), 0), list(range(samples)), prompt, sampling, **kwargs)  # type: ignore[arg-type]


def run(engine: Engine, limit: int = 200) -> list[StepResult]:
    return [result for _, result in turns(engine, limit)]


def turns(engine: Engine, limit: int = 200) -> list[tuple[Plan, StepResult]]:
    """What was decided and what came of it, turn by turn, until nothing is left to do."""
    done: list[tuple[Plan, StepResult]] = []
    again = True
    while (again or engine.has_work) and len(done) < limit:
        plan = engine.schedule(float(len(done)))
        result = engine.compute(plan)
        done.append((plan, result))
        again = result.again
        engine.check_integrity()
    return done
