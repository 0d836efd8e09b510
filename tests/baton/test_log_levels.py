"""--log-level: one level for all modules, and others for some."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from baton.log_levels import LEVELS, LogLevels, parse_log_levels
from baton.settings import Settings, SettingsError, load
from baton.telemetry import configure_logging

MODULES = ("one", "one.part", "other")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What the process logs, at the levels that a test sets."""
    root = logging.getLogger()
    handlers, loggers = list(root.handlers), [root, *map(logging.getLogger, MODULES)]
    levels = [logger.level for logger in loggers]
    yield io.StringIO()
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("level", LEVELS)
def test_one_level_is_that_of_all(level: str) -> None:
    assert parse_log_levels(level) == LogLevels(logging.getLevelNamesMapping()[level.upper()])


def test_a_module_and_what_is_below_it_have_their_own(written: io.StringIO) -> None:
    levels = load(Settings, {"log_level": "warning, one=debug,one.part=error"}).log_levels()
    configure_logging(levels, "n0", written)
    for module in MODULES:
        for level in LEVELS:
            logging.getLogger(module).log(logging.getLevelNamesMapping()[level.upper()], "said")
    lines = written.getvalue().splitlines()
    found = [
        tuple(part.partition("=")[2] for part in line.split() if part[:6] in ("level=", "logger")) for line in lines
    ]
    assert found == [
        *((level, "one") for level in LEVELS),
        ("error", "one.part"),
        ("warning", "other"),
        ("error", "other"),
    ]


def test_with_modules_alone_the_others_keep_the_default() -> None:
    assert parse_log_levels("one=debug") == LogLevels(logging.INFO, {"one": logging.DEBUG})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loud", "must be of debug, info, warning, error, or MODULE=LEVEL, not 'loud'"),
        ("info,", "must be of debug, info, warning, error, or MODULE=LEVEL, not ''"),
        ("one=loud", "must be of debug, info, warning, error, or MODULE=LEVEL, not 'one=loud'"),
        ("=debug", "must have a module before each '=', as in router.http=debug, not '=debug'"),
        ("one=two=debug", "must have a module before each '=', as in router.http=debug, not 'one=two=debug'"),
        ("info,debug", "must name the level of all modules once, not twice"),
        ("one=info,one=debug", "must name one once, not twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_flags_name(text: str, problem: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(Settings, {"log_level": text})
    assert str(refused.value) == f"--log-level: {problem}"
