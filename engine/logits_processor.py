"""Third-party code that changes the logits of a sequence, before anything else does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_WITH_PROMPT = 3
"""The number of arguments of a processor that also takes the prompt."""


class ProcessorFailed(Exception):
    """A processor raised, or did not return logits; the text names the processor."""


class LogitsProcessorChain:
    """The processors of one request, in order; all of its samples share them.

    Each takes (output token ids, logits), or (prompt token ids, output token ids, logits), and returns logits, as in
    vLLM's first engine. logits: [vocab_size], fp32, on the engine's device; a processor may change and return them.
    The result must depend on the tokens alone: any node may continue the sequence, from any of its tokens.
    """

    def __init__(self, processors: Sequence[tuple[str, Callable[..., Any]]]) -> None:
        """processors: (name, function) pairs. Raises ValueError if a function takes other arguments."""
        self._processors = [(name, process, _takes_prompt(name, process)) for name, process in processors]

    def __call__(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Raises ProcessorFailed."""
        for name, process, takes_prompt in self._processors:
            tokens = [list(prompt_tokens), list(output_tokens)] if takes_prompt else [list(output_tokens)]
            try:
                result = process(*tokens, logits)
                shape = getattr(result, "shape", None)
                processed = result.to(logits).to_dense() if shape == logits.shape else None
            except Exception as error:  # a request's boundary: whatever third-party code raises ends that request
                raise ProcessorFailed(f"{name} failed: {type(error).__name__}: {error}") from error
            if processed is None:
                what = f"of shape {list(shape)}" if shape is not None else f"a {type(result).__name__}"
                raise ProcessorFailed(f"{name} returned logits {what}, not of {list(logits.shape)}")
            logits = processed
        return logits


def _takes_prompt(name: str, process: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(process)
        count = len(signature.parameters)
    except (TypeError, ValueError):
        raise ValueError(f"{name} makes no function with arguments that are known") from None
    if count not in (_WITH_PROMPT - 1, _WITH_PROMPT):
        raise ValueError(f"{name} makes a function of {count} arguments, not of 2 or 3")
    return count == _WITH_PROMPT
