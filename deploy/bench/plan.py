"""Which request is sent when, from the settings and a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deploy.bench.arrivals import arrival_times
from deploy.bench.prompts import PromptTexts
from deploy.bench.settings import BenchSettings
from deploy.bench.trace import Entry, read_trace
from deploy.bench.workloads import Shape, multi_turn, shared_prefix, uncorrelated

DEFAULT_RATE = 1.0
_MADE = {"random": uncorrelated, "shared-prefix": shared_prefix, "multi-turn": multi_turn}


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`at`: seconds after the start of the run."""

    at: float
    body: dict[str, Any]


class Planner:
    """Reads a trace once. Raises OSError and ValueError for one that cannot be read."""

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        self._trace = read_trace(settings.trace_file) if settings.trace_file else []

    def plan(self, model: str, seed: int, run: str, rate: float | None) -> list[PlannedRequest]:
        """The requests of one run. Runs of other names have other prompts: none finds another's in a prefix cache."""
        entries = self._entries(seed, rate or DEFAULT_RATE)
        texts = PromptTexts(f"{seed} {run}")
        times = self._times(entries, seed, rate)
        return [
            PlannedRequest(at, self._body(model, texts.text(entry), entry.output_length))
            for at, entry in zip(times, entries, strict=True)
        ]

    def _entries(self, seed: int, rate: float) -> list[Entry]:
        settings = self._settings
        if settings.workload == "trace":
            return self._trace[: settings.num_prompts]
        shape = Shape(
            num_requests=settings.num_prompts,
            per_s=rate,
            seed=seed,
            input_len=settings.input_len,
            output_len=settings.output_len,
            prefix_len=settings.prefix_len,
            num_prefixes=settings.num_prefixes,
            num_turns=settings.num_turns,
            think_s=settings.think_time,
        )
        return _MADE[settings.workload](shape)

    def _times(self, entries: list[Entry], seed: int, rate: float | None) -> list[float]:
        settings = self._settings
        if settings.workload == "multi-turn" or (settings.workload == "trace" and rate is None):
            return [(entry.timestamp - entries[0].timestamp) / 1e3 for entry in entries]
        return arrival_times(settings.arrival, len(entries), rate or DEFAULT_RATE, settings.burst_size, seed)

    def _body(self, model: str, text: str, output_len: int) -> dict[str, Any]:
        chat = self._settings.endpoint == "chat"
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        options: dict[str, Any] = {"ignore_eos": True} if self._settings.ignore_eos else {}
        return {
            "model": model,
            **asked,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
