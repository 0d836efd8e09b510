"""What `LLM.generate` and `LLM.chat` raise when some of several prompts fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import BatonError
from baton_llm.outputs import RequestOutput


class PromptsFailed(Exception):
    """Some prompts failed, the others were answered.

    `errors`: by the prompt's place in the call. `outputs`: those of all prompts in order, None for those that failed.
    """

    def __init__(self, errors: Mapping[int, BatonError], outputs: Sequence[RequestOutput | None]) -> None:
        index, error = next(iter(errors.items()))
        super().__init__(f"{len(errors)} of {len(outputs)} prompts failed, first prompt {index}: {error.message}")
        self.errors = dict(errors)
        self.outputs = list(outputs)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which would make it of the message alone: an error that cannot be read back from a worker ends
        the caller's whole pool of processes."""
        return type(self), (self.errors, self.outputs)
