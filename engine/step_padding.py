"""To how many tokens a device pads steps with prompts, as CUDA graphs do."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPadding:
    """`ladders`: for each number of places for decodes, ascending, the numbers of prompt tokens, ascending, for which
    there is a graph; 0 places are for prompts without decodes. A step uses the graph with the fewest tokens that has
    room for it. Without ladders nothing is padded. `most_prompts`, `most_context`: the most prompts of a graph, and the
    longest context of any of them; None: unlimited."""

    ladders: tuple[tuple[int, tuple[int, ...]], ...] = ()
    most_prompts: int | None = None
    most_context: int | None = None

    def fitting(self, num_decodes: int, num_prompt_tokens: int) -> tuple[int, int] | None:
        """How many decodes and prompt tokens the smallest fitting graph has places for. None: no graph is large
        enough."""
        found = []
        for places, sizes in self.ladders:
            index = bisect.bisect_left(sizes, num_prompt_tokens)
            if places >= num_decodes and index < len(sizes):
                found.append((places, sizes[index]))
        return min(found, key=sum, default=None)

    def takes(self, num_prompts: int, context: int) -> bool:
        """Whether graphs take this many prompts. context: how many tokens the longest has by the end of the step."""
        fits = self.most_context is None or context <= self.most_context
        return fits and (self.most_prompts is None or num_prompts <= self.most_prompts)

    def largest(self, num_decodes: int) -> int:
        """The prompt tokens of the largest graph with places for `num_decodes` decodes. 0: there is none."""
        return max((sizes[-1] for places, sizes in self.ladders if places >= num_decodes), default=0)

    def padded(self, num_decodes: int, num_prompt_tokens: int) -> int:
        """How many tokens the device computes besides those of the decodes."""
        if not num_prompt_tokens or (graph := self.fitting(num_decodes, num_prompt_tokens)) is None:
            return num_prompt_tokens
        return sum(graph) - num_decodes

    def sizes(self, num_decodes: int) -> tuple[int, ...]:
        """The numbers of prompt tokens, ascending, that leave no place for prompts empty in a graph with `num_decodes`
        decodes. Empty: nothing is padded."""
        return next((sizes for places, sizes in self.ladders if places >= num_decodes), ())


UNPADDED = StepPadding()
