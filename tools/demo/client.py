"""Requests as any client makes them, through the `openai` package, and the timings that come with each answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from tools.tiny_tasks import Sample

MODEL = "baton-tiny"
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with its statistics. `timings` is baton's addition to the API: milliseconds, nodes, cached tokens."""

    name: str
    text: str
    num_prompt_tokens: int
    num_tokens: int
    timings: dict[str, Any]

    @property
    def tokens_per_s(self) -> float:
        """The decode node's rate: all tokens but the first, over the time from the first to the end."""
        decoding_s = (self.timings["total_ms"] - self.timings["first_token_ms"]) / 1e3
        return (self.num_tokens - 1) / decoding_s if decoding_s > 0 else 0.0


class Client:
    """Sends requests to one cluster."""

    def __init__(self, url: str) -> None:
        self._openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0)

    async def close(self) -> None:
        await self._openai.close()

    async def ask(self, name: str, sample: Sample, show: Callable[[str], None] = lambda _: None) -> Reply:
        """Stream the answer to a chat; `show` gets the text as it comes."""
        messages: Any = sample.messages
        stream = await self._openai.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        pieces: list[str] = []
        async for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                pieces.append(piece)
                show(piece)
        assert chunk.usage, "the last chunk carries the usage"
        assert chunk.model_extra, "and the timings"
        usage = chunk.usage
        return Reply(name, "".join(pieces), usage.prompt_tokens, usage.completion_tokens, chunk.model_extra["timings"])

    async def ask_and_leave(
        self, sample: Sample, num_chunks: int, num_tokens: int, meanwhile: Callable[[], Any]
    ) -> Any:
        """Ask for `num_tokens` tokens, await `meanwhile` after `num_chunks` chunks, disconnect, return its result."""
        messages: Any = sample.messages
        stream = await self._openai.chat.completions.create(
            model=MODEL, messages=messages, stream=True, max_tokens=num_tokens, extra_body={"ignore_eos": True}
        )
        async with stream:
            remaining = num_chunks
            async for _ in stream:
                remaining -= 1
                if not remaining:
                    return await meanwhile()
        raise AssertionError(f"the answer ended before chunk {num_chunks}")
