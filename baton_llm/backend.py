"""Where prompts are answered: by the engines of this process (`local`), or by a cluster (`remote`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from baton.node_info import GenerationDefaults
from baton_llm.prompts import Encoded, Input
from baton_llm.sampling_params import SamplingParams
from router.text.answer import Delta
from router.text.generation_request import GenerationRequest

CLOSED = "the LLM is closed"
"""The error of requests that `LLM.close` ends."""


class Backend(Protocol):
    """The coroutines run on one event loop; `close` runs on another thread.

    `max_in_flight`: the most prompts that may be under way at once.
    """

    max_in_flight: int

    async def start(self) -> None:
        """Before anything else. Raises BatonError, OSError or ValueError."""

    async def encode(self, prompt: Input, params: SamplingParams | None) -> Encoded:
        """Tokenize a prompt and check it together with its params. Raises BatonError: InvalidRequest for what can never
        be answered."""

    async def generate(self, request: GenerationRequest, take: Callable[[Sequence[Delta]], None]) -> int:
        """Give the answers to the request's only prompt to `take`, piece by piece; returns how many of the prompt's
        tokens were cached. When it is cancelled, so is the request. Raises BatonError."""

    def token_text(self, token_id: int) -> str | None:
        """The text of a token. None: not known here."""

    async def defaults(self) -> GenerationDefaults:
        """What the model's generation_config.json states. Raises BatonError."""

    def tokenizer(self) -> Any:
        """The model's, as transformers has it. Raises NotImplementedError where the model is elsewhere."""

    async def stop(self) -> None:
        """End all requests, with an error."""

    def close(self) -> None:
        """After `stop`: end all threads but the event loop's, and free everything. Idempotent."""
