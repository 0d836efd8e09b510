"""`baton bench`: warm up, run each seed or search, report."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import uvloop
from tqdm import tqdm

from baton.process.open_files import raise_open_files
from baton.settings import EXIT_USAGE, flag_name, parse
from deploy.bench.client import Client, RequestFailed, Target
from deploy.bench.figures import figures
from deploy.bench.goodput import Limits, highest_rate
from deploy.bench.load import Outcome, run_load
from deploy.bench.page import page
from deploy.bench.plan import Planner
from deploy.bench.png import is_available, png
from deploy.bench.report import as_json, environment, report
from deploy.bench.settings import BenchSettings
from deploy.command import EXIT_INTERRUPTED

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a report, and exit: 1 if a request failed, unless --allow-failures, and 130 on Ctrl-C or
    another stop signal, with a report of the runs that are over."""
    settings = parse(BenchSettings, argv)
    try:
        planner = Planner(settings)
    except (OSError, ValueError) as error:
        _fail(f"--trace-file: {error}", EXIT_USAGE)
    _check_files(settings)
    raise_open_files()
    bench = Bench(settings, planner)
    try:
        results = uvloop.run(bench.run())
    except RequestFailed as error:
        _fail(f"{settings.url}: {error}", EXIT_FAILED)
    except KeyboardInterrupt:
        print(report(bench.results.runs, None, bench.results.details))
        _fail("interrupted", EXIT_INTERRUPTED)
    text = report(results.runs, results.goodput, results.details)
    print(text)
    try:
        _write(settings, results, text)
    except OSError as error:
        _fail(f"cannot write the results: {error}", EXIT_FAILED)
    failed = sum(run["failed"] for run in results.runs.values())
    sys.exit(EXIT_FAILED if failed and not settings.allow_failures else 0)


def _check_files(settings: BenchSettings) -> None:
    """That results can be written, before they take hours."""
    for name in ("result_file", "html_file", "png_file"):
        path: Path | None = getattr(settings, name)
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            _fail(f"{flag_name(name)}: cannot write {path}", EXIT_USAGE)
    if settings.png_file and not is_available():
        _fail("--png-file: needs matplotlib: pip install baton-serve[plots]", EXIT_USAGE)


def _fail(text: str, code: int) -> NoReturn:
    sys.stderr.write(f"{BenchSettings.prog}: {text}\n")
    sys.exit(code)


@dataclass(slots=True)
class Results:
    """`runs`: figures by the name of the run. `details`: an example of each kind of failure."""

    model: str
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    goodput: dict[str, Any] | None = None


class Bench:
    """One call of the command."""

    def __init__(self, settings: BenchSettings, planner: Planner) -> None:
        self._settings = settings
        self._planner = planner
        key = settings.api_key
        headers = (("authorization", f"Bearer {key.get_secret_value()}"),) if key else ()
        self._client = Client(Target(settings.url, headers))
        self._path = "chat/completions" if settings.endpoint == "chat" else "completions"
        self.results = Results(settings.model or "")

    async def run(self) -> Results:
        """Raises RequestFailed if the server lists no model, or refuses to warm up."""
        settings = self._settings
        try:
            self.results.model = settings.model or await self._first_model()
            warm_up = itertools.cycle(self._planner.plan(self.results.model, 0, "warm-up", None))
            for request in itertools.islice(warm_up, settings.num_warmups):
                await self._client.stream(self._path, request.body, settings.request_timeout)
            if settings.searches:
                self.results.goodput = await self._search()
            else:
                for seed in settings.seeds:
                    await self._measure(f"seed {seed}", seed, settings.request_rate)
        finally:
            self._client.close()
        return self.results

    async def _first_model(self) -> str:
        listed = await self._client.get("models", self._settings.request_timeout)
        try:
            return str(listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise RequestFailed("no_model", "the server lists none: name one with --model") from None

    async def _measure(self, name: str, seed: int, rate: float | None) -> list[Outcome]:
        planned = self._planner.plan(self.results.model, seed, name, rate)
        quiet = not self._settings.progress or not sys.stderr.isatty()
        with tqdm(total=len(planned), desc=name, unit="req", disable=quiet, leave=False) as bar:
            outcomes = await run_load(
                planned,
                lambda body: self._client.stream(self._path, body, self._settings.request_timeout),
                lambda _: bar.update(),
            )
        self.results.runs[name] = figures(outcomes)
        self.results.outcomes[name] = outcomes
        self.results.details |= {outcome.error: outcome.detail for outcome in outcomes if outcome.error}
        return outcomes

    async def _search(self) -> dict[str, Any]:
        settings = self._settings
        limits = Limits(settings.goodput_ttft or math.inf, settings.goodput_itl or math.inf)
        low, high = settings.goodput_min_rate, settings.goodput_max_rate
        tried: dict[str, list[dict[str, float]]] = {}
        found, offered = list[float](), list[float]()
        for seed in settings.seeds:
            trials = tried[f"seed {seed}"] = list[dict[str, float]]()

            async def attains(rate: float, seed: int = seed, trials: list[dict[str, float]] = trials) -> bool:
                name = f"seed {seed}, trial {len(trials) + 1} at {rate:.3f}/s"  # of its own, however close rates are
                share = limits.share(await self._measure(name, seed, rate))
                offered_per_s = self.results.runs[name]["offered_per_s"]
                trials.append({"rate": rate, "offered_per_s": offered_per_s, "share": share})
                return share >= settings.goodput_share

            found.append(await highest_rate(attains, low, high, settings.goodput_steps))
            offered_at = {trial["rate"]: trial["offered_per_s"] for trial in trials}
            offered.append(offered_at[found[-1] or low])
        bounds = {"min_rate": low, "max_rate": high}
        median = statistics.median_low(found)  # one that was tried: a mean with a bound would be neither
        rates = {"requests_per_s": median, "per_seed": found, "offered_per_s": offered}
        return {**rates, **bounds, "trials": tried}


def _write(settings: BenchSettings, results: Results, text: str) -> None:
    if settings.result_file:
        stated = {
            "settings": settings.model_dump(mode="json", exclude={"api_key"}),
            "model": results.model,
            "environment": environment(),
            "runs": results.runs,
            "goodput": results.goodput,
        }
        _write_text(settings.result_file, as_json(stated))
    title = f"{results.model} at {settings.url}: {settings.workload}"
    if settings.html_file:
        _write_text(settings.html_file, page(title, text, results.outcomes))
    if settings.png_file:
        settings.png_file.write_bytes(png(title, results.outcomes))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
