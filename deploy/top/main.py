"""`baton top`: look at a router again and again, and show what it says."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from baton.settings import parse
from deploy.top.history import History
from deploy.top.settings import TopSettings
from deploy.top.source import NoAnswer, Source
from deploy.top.view import view

EXIT_FAILED = 1
WIDTH = 120
"""Columns where the output is no terminal."""


def main(argv: Sequence[str] | None = None) -> None:
    """Until Ctrl-C, or one table."""
    settings = parse(TopSettings, argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        if settings.once or not console.is_terminal:
            _once(settings, console)
        else:
            with contextlib.suppress(KeyboardInterrupt):
                _watch(settings, console)
    except NoAnswer as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(EXIT_FAILED)


def _once(settings: TopSettings, console: Console) -> None:
    """Rates need two looks."""
    source, history = Source(settings), History()
    history.add(source.snapshot())
    threading.Event().wait(settings.interval)
    snapshot = source.snapshot()
    history.add(snapshot)
    console.print(view(snapshot, history, source.url))


def _watch(settings: TopSettings, console: Console) -> None:
    """A router that does not answer is asked again; raises NoAnswer if that is in vain."""
    source, history = Source(settings), History()
    snapshot = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            trouble = ""
            try:
                snapshot = source.snapshot()
                history.add(snapshot)
            except NoAnswer as error:
                if error.final:
                    raise
                trouble = str(error)
            shown = view(snapshot, history, source.url, trouble) if snapshot else Text(trouble, "red")
            live.update(shown, refresh=True)
            threading.Event().wait(settings.interval)
