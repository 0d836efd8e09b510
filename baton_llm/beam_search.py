"""vLLM's `BeamSearchParams`, as params of a request."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton_llm.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Names and defaults are vLLM's.

    beam_width: how many beams are followed, and answers returned, best first; at most 10. max_tokens: of each answer.
    length_penalty: an answer's score is its cumulative logprob, divided by the length of prompt and answer to the power
    of this; above 1 it prefers long ones. temperature must be 0.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest."""
        if not isinstance(self.beam_width, int) or self.beam_width < 1:
            raise InvalidRequest(f"beam_width must be 1 or more, not {self.beam_width!r}", "beam_width")
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,  # all answers are known at once
        )
