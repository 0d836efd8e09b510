"""Pages of /metrics: what counters grew by, and what gauges said."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True, slots=True)
class Page:
    """One page of one process."""

    samples: dict[str, list[Sample]]

    @classmethod
    def parse(cls, text: str) -> Page:
        """Raises ValueError for what is no page of a router or a node."""
        samples: dict[str, list[Sample]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name, []).append(sample)
        except (ValueError, LookupError) as error:
            raise ValueError(f"it is not in Prometheus' text format: {error}") from None
        if "baton:build_info" not in samples:
            raise ValueError("it is not the page of a router or a node of baton")
        return cls(samples)

    def find(self, name: str, labels: dict[str, str]) -> list[Sample]:
        wanted = labels.items()
        return [sample for sample in self.samples.get(name, ()) if wanted <= sample.labels.items()]

    @property
    def role(self) -> str:
        return self.samples["baton:build_info"][0].labels.get("role", "")

    @property
    def process(self) -> tuple[str, tuple[float, ...]]:
        """The same on all pages of one process; of a router with workers, of all of them."""
        # the start of a process has a resolution of 10 ms, in which two nodes may start; of a counter, of microseconds
        names = ("process_start_time_seconds", "baton:node_prompt_tokens_created")
        starts = {sample.value for name in names for sample in self.samples.get(name, ())}
        return self.role, tuple(sorted(starts))

    @property
    def cpu_s(self) -> float:
        """Grows with the time of the page."""
        return sum(sample.value for sample in self.samples.get("process_cpu_seconds_total", ()))


@dataclass(frozen=True, slots=True)
class Window:
    """The pages of one process, in order. One page stands for the time since the process's start. seconds: between the
    first page and the last; None: not known."""

    pages: Sequence[Page]
    seconds: float | None = None

    @property
    def role(self) -> str:
        return self.pages[0].role

    def has(self, name: str) -> bool:
        return name in self.pages[-1].samples

    def increase(self, name: str, **labels: str) -> float:
        """Of a counter, summed over all other labels."""
        return _total(self.pages[-1], name, labels) - self._before(name, labels)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """The increase for each value of a label."""
        found = dict.fromkeys(sample.labels.get(label, "") for sample in self.pages[-1].find(name, labels))
        return {value: self.increase(name, **labels, **{label: value}) for value in found}

    def gauge(self, name: str, **labels: str) -> float | None:
        """The mean over all pages and, within a page, over workers. None: it is on no page."""
        values = [sample.value for page in self.pages for sample in page.find(name, labels)]
        return sum(values) / len(values) if values else None

    def gauge_sum(self, name: str, **labels: str) -> float:
        """The mean over all pages of a gauge of which each worker has a part: within a page, their sum."""
        return sum(_total(page, name, labels) for page in self.pages) / len(self.pages)

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """Of a histogram's increase: the upper bound of the bucket that has it. None: nothing was observed."""
        buckets = sorted(
            (math.inf if bound == "+Inf" else float(bound), count)
            for bound, count in self.by("le", f"{name}_bucket", **labels).items()
        )
        if not buckets or not buckets[-1][1]:
            return None
        return next(bound for bound, count in buckets if count >= share * buckets[-1][1])

    def mean(self, name: str, **labels: str) -> float | None:
        """Of a histogram's increase. None: nothing was observed."""
        count = self.increase(f"{name}_count", **labels)
        return self.increase(f"{name}_sum", **labels) / count if count else None

    def _before(self, name: str, labels: dict[str, str]) -> float:
        return _total(self.pages[0], name, labels) if len(self.pages) > 1 else 0.0


def windows(pages: Iterable[Page]) -> list[Window]:
    """Saved pages, by process."""
    by_process: dict[tuple[str, tuple[float, ...]], list[Page]] = {}
    for page in pages:
        by_process.setdefault(page.process, []).append(page)
    return [Window(sorted(found, key=lambda page: page.cpu_s)) for found in by_process.values()]


def _total(page: Page, name: str, labels: dict[str, str]) -> float:
    return sum(sample.value for sample in page.find(name, labels))
