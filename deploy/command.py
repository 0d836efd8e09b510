"""The command `baton`: the other commands as its subcommands, and those that have names of their own.

A subcommand's module is imported only when it is called: `baton version` and `baton bench` import no torch, and start
in a fraction of a second. Nor are settings imported before: that takes a tenth of a second, in which a container that
is told to end could not (`baton.process.signals`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import baton
from baton.process.signals import end_at_signals, interrupted_by_signals
from baton.process.standard_files import open_standard_files
from baton.setting_names import closest

EXIT_INTERRUPTED = 130
EXIT_READER_LEFT = 141
"""What shells report for a command that SIGPIPE ends."""


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One line of `baton --help`. `entry`: MODULE:FUNCTION, called with the arguments after the name. `settings`:
    MODULE:CLASS of its flags, for completion; empty without flags. `serves`: it handles signals itself."""

    summary: str
    entry: str
    settings: str = ""
    words: tuple[str, ...] = ()
    serves: bool = False


SUBCOMMANDS = {
    "up": Subcommand(
        "start a whole cluster on this machine", "deploy.up:main", "deploy.settings:UpSettings", serves=True
    ),
    "router": Subcommand(
        "serve the HTTP and gRPC APIs", "router.main:main", "router.settings:RouterSettings", serves=True
    ),
    "prefill": Subcommand(
        "serve as a prefill node", "prefill_node.main:main", "prefill_node.settings:PrefillSettings", serves=True
    ),
    "decode": Subcommand(
        "serve as a decode node", "decode_node.main:main", "decode_node.settings:DecodeSettings", serves=True
    ),
    "bench": Subcommand(
        "measure a server with OpenAI's API under load",
        "deploy.bench.main:main",
        "deploy.bench.settings:BenchSettings",
    ),
    "doctor": Subcommand(
        "check this machine and the transfer path",
        "deploy.doctor.main:main",
        "deploy.doctor.settings:DoctorSettings",
    ),
    "tune": Subcommand(
        "read a cluster's metrics and propose what to set",
        "deploy.tune.main:main",
        "deploy.tune.settings:TuneSettings",
    ),
    "top": Subcommand(
        "show a router's nodes and latencies in a terminal",
        "deploy.top.main:main",
        "deploy.top.settings:TopSettings",
    ),
    "completion": Subcommand(
        "print a completion script for bash, zsh or fish", "deploy.completion:main", words=("bash", "zsh", "fish")
    ),
    "version": Subcommand("print the version", "deploy.command:print_version"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand. Exits with 2, naming the nearest one, if there is no such subcommand, with 130 on a Ctrl-C
    or another stop signal that the subcommand leaves to us, and with 141 if it cannot print because its reader has
    left, as `head` does."""
    end_at_signals()
    open_standard_files()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        _refuse(usage())
    try:
        _run(arguments[0], arguments[1:])
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        if not _reader_left():
            raise
        sys.exit(EXIT_READER_LEFT)
    finally:
        _reader_left()  # also after --help, which exits: nothing is left to print at Python's exit


def up() -> None:
    """The command `baton-up`."""
    main(["up", *sys.argv[1:]])


def router() -> None:
    """The command `baton-router`."""
    main(["router", *sys.argv[1:]])


def prefill() -> None:
    """The command `baton-prefill`."""
    main(["prefill", *sys.argv[1:]])


def decode() -> None:
    """The command `baton-decode`."""
    main(["decode", *sys.argv[1:]])


def _run(name: str, rest: Sequence[str]) -> None:
    if name in ("-h", "--help", "help"):
        print(usage(), end="")
    elif name == "--version":
        print_version(rest)
    elif name in SUBCOMMANDS:
        subcommand = SUBCOMMANDS[name]
        with contextlib.nullcontext() if subcommand.serves else interrupted_by_signals():
            load(subcommand.entry)(rest)
    else:
        meant = closest(name, SUBCOMMANDS)
        hint = f", did you mean {meant!r}?" if meant else "; `baton --help` lists them"
        _refuse(f"baton: no subcommand {name!r}{hint}\n")


def _refuse(text: str) -> NoReturn:
    from baton.settings import EXIT_USAGE

    sys.stderr.write(text)
    sys.exit(EXIT_USAGE)


def _reader_left() -> bool:
    """Whether what is printed has no reader anymore. The rest of it then goes nowhere, or Python would complain at its
    exit."""
    try:
        ours = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed before or since we began, or no file
        return False
    poll = select.poll()
    poll.register(ours, 0)  # a pipe without a reader has an error, a socket without a peer has hung up
    if not poll.poll(0):
        return False
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), ours)
    return True


def usage() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:{width}}  {subcommand.summary}" for name, subcommand in SUBCOMMANDS.items()]
    return "\n".join(
        ["usage: baton SUBCOMMAND [--flag value ...]", "", *lines, "", "baton SUBCOMMAND --help lists its flags.", ""]
    )


def load(entry: str) -> Callable[[Sequence[str]], None]:
    """The function that MODULE:FUNCTION names."""
    module, _, name = entry.partition(":")
    function: Callable[[Sequence[str]], None] = getattr(importlib.import_module(module), name)
    return function


def print_version(argv: Sequence[str]) -> None:
    if argv:
        _refuse(f"baton version: takes no argument, not {argv[0]!r}\n")
    print(f"baton {baton.__version__}")


if __name__ == "__main__":
    main()
