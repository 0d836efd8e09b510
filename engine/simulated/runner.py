"""The ModelRunner of a simulated node: a step ends when a real one would."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random

from baton.layout import layer_groups_of
from baton.prompt_logprobs import PromptLogprobs
from engine.sequence import Sequence
from engine.simulated.profile import Profile
from engine.simulated.tokens import MadeUpTokens
from engine.step import Begun, Choice, Chunk
from engine.step_size import StepSize


class SimulatedModelRunner:
    """Implements `engine.step.ModelRunner` over blocks without content. Steps run one after the other.

    clock: seconds. wake_at: calls the engine's loop at a time of that clock, when a step, or a group of layers of a
    step that ends a prompt to hand off, is done. time_scale: by how much time here passes faster than in the profile.
    seed: of what the profile's spread makes of steps.
    """

    only_launches = True

    def __init__(
        self,
        profile: Profile,
        tokens: MadeUpTokens,
        *,
        clock: Callable[[], float],
        wake_at: Callable[[float], None],
        layer_groups: int = 1,
        time_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._profile = profile
        self._tokens = tokens
        self._clock = clock
        self._wake_at = wake_at
        self._time_scale = time_scale
        self._num_layers = profile.model.num_layers
        self._groups = [end for _, end in layer_groups_of(self._num_layers, layer_groups)]
        self._idle_from = 0.0  # when the last launched step ends
        self._random = Random(seed)
        self._known = set[Sequence]()  # those that have been in a step

    def launch(self, chunks: Seq[Chunk], begun: Begun = lambda waited_s: None) -> SimulatedStep:
        """See `engine.step.ModelRunner`."""
        begins = max(self._clock(), self._idle_from)
        takes_s = self._step_s(chunks) / self._time_scale
        self._idle_from = begins + takes_s
        marks = [(self._idle_from, self._num_layers)]
        if any(chunk.samples_token and chunk.sequence.hand_off for chunk in chunks):
            marks = [(begins + takes_s * end / self._num_layers, end) for end in self._groups]
        for when, _ in marks:
            self._wake_at(when)
        begun(0.0)
        # Made up now: what is made up of a sequence after its end would be kept for ever.
        choices = [self._tokens.choices(chunk) for chunk in chunks]
        scored = [(c.sequence, piece) for c in chunks for piece in self._tokens.prompt_logprobs(c)]
        return SimulatedStep(choices, scored, marks, self._clock)

    def _step_s(self, chunks: Seq[Chunk]) -> float:
        size = StepSize.of(chunks)
        factor = self._random.choice(self._profile.spread_of(size))
        return factor * self._profile.step_s(size, self._num_adopted(chunks))

    def _num_adopted(self, chunks: Seq[Chunk]) -> int:
        """Sequences that are decoded although no step here has computed anything of them."""
        new = {chunk.sequence: chunk.is_decode for chunk in chunks if chunk.sequence not in self._known}
        self._known.update(new)
        return sum(new.values())

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Nothing: blocks have no content."""

    def forget(self, sequence: Sequence) -> None:
        """See `engine.step.ModelRunner`."""
        self._known.discard(sequence)
        self._tokens.forget(sequence)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Implements `engine.step.LaunchedStep`. `choices`, `scored`: what `wait` and `prompt_logprobs` return. `marks`:
    (time, number of layers that are done by then), in order; the last one is the step's end."""

    choices: list[list[Choice]]
    scored: list[tuple[Sequence, PromptLogprobs]]
    marks: list[tuple[float, int]]
    clock: Callable[[], float]

    def is_done(self) -> bool:
        return self.clock() >= self.marks[-1][0]

    def num_layers_done(self) -> int:
        now = self.clock()
        return max((layers for when, layers in self.marks if when <= now), default=0)

    def wait(self) -> list[list[Choice]]:
        """Never waits: a node's loop comes back when `is_done`."""
        return self.choices

    def prompt_logprobs(self) -> list[tuple[Sequence, PromptLogprobs]]:
        return self.scored
