"""`baton tune`: read metrics, apply the rules, report."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from tqdm import tqdm

from baton.settings import parse
from deploy.tune import report
from deploy.tune.figures import figures
from deploy.tune.rules import Goals, propose
from deploy.tune.settings import TuneSettings
from deploy.tune.sources import Unreadable, Watched, from_files, sleep, watch

EXIT_FAILED = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Print what was measured and what to change."""
    settings = parse(TuneSettings, argv)
    try:
        watched = Watched(from_files(settings.metrics)) if settings.metrics else _watch(settings)
        found = figures(watched.windows)
    except (Unreadable, ValueError) as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(EXIT_FAILED)
    proposals = propose(found, Goals(settings.goodput_ttft, settings.goodput_itl)) if found.num_requests else []
    if settings.json_output:
        print(report.as_json(found, proposals, watched.missing))
    else:
        report.print_report(found, proposals, watched.missing, Console())


def _watch(settings: TuneSettings) -> Watched:
    quiet = not sys.stderr.isatty()
    with tqdm(total=settings.duration, unit="s", desc="watching", disable=quiet, leave=False) as bar:
        return watch(settings, lambda passed_s: bar.update(min(passed_s, settings.duration) - bar.n), sleep)


if __name__ == "__main__":
    main()
