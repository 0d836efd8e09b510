"""Shell completion of `baton`, from the fields of each subcommand's settings.

A script is a list of words for each place: made once and sourced, it starts no process at each press of Tab.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from baton.settings import EXIT_USAGE, Settings, flag_name
from deploy.command import SUBCOMMANDS, Subcommand


def main(argv: Sequence[str]) -> None:
    """Print the script for the shell in `argv`. Exits with 2 for another one."""
    if len(argv) != 1 or argv[0] not in _SHELLS:
        sys.stderr.write(f"baton completion: name one shell of {', '.join(_SHELLS)}\n")
        sys.exit(EXIT_USAGE)
    print(_SHELLS[argv[0]](), end="")


def flags_of(subcommand: Subcommand) -> list[tuple[str, tuple[str, ...]]]:
    """Each flag of a subcommand with the values that it has to choose from; none: any value."""
    if not subcommand.settings:
        return []
    module, _, name = subcommand.settings.partition(":")
    settings: type[Settings] = getattr(importlib.import_module(module), name)
    flags: list[tuple[str, tuple[str, ...]]] = [("--help", ()), ("--version", ())]
    for field, info in settings.model_fields.items():
        flags.append((flag_name(field), _choices(info.annotation)))
        if bool in (info.annotation, *get_args(info.annotation)):
            flags.append((flag_name(f"no_{field}"), ()))
    return flags


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    return next((found for part in get_args(annotation) if (found := _choices(part))), ())


def _cases() -> Iterator[str]:
    """Branches of a shell's `case` on "SUBCOMMAND PREVIOUS_WORD", the values of flags before the flags."""
    for name, subcommand in SUBCOMMANDS.items():
        flags = flags_of(subcommand)
        for flag, choices in flags:
            if choices:
                yield f'    "{name} {flag}") words="{" ".join(choices)}" ;;'
        words = [*(flag for flag, _ in flags), *subcommand.words]
        yield f'    "{name} "*) words="{" ".join(words)}" ;;'


def _bash() -> str:
    return "\n".join(
        [
            "_baton() {",
            '  local words="" current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
            f'  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(SUBCOMMANDS)}"; else',
            '  case "${COMP_WORDS[1]} $previous" in',
            *_cases(),
            "  esac; fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _baton baton",
            "",
        ]
    )


def _zsh() -> str:
    return "\n".join(
        [
            "#compdef baton",
            "_baton() {",
            '  local candidates=""',
            f'  if (( CURRENT == 2 )); then candidates="{" ".join(SUBCOMMANDS)}"; else',
            '  case "${words[2]} ${words[CURRENT-1]}" in',
            *(line.replace('words="', 'candidates="') for line in _cases()),
            "  esac; fi",
            "  compadd -- ${=candidates} || _files",
            "}",
            "compdef _baton baton",
            "",
        ]
    )


def _fish() -> str:
    lines = []
    for name, subcommand in SUBCOMMANDS.items():
        summary = subcommand.summary.replace("'", "")
        lines.append(f"complete -c baton -f -n __fish_use_subcommand -a {name} -d '{summary}'")
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c baton {seen} -f -a {word}" for word in subcommand.words]
        for flag, choices in flags_of(subcommand):
            values = f" -x -a '{' '.join(choices)}'" if choices else ""
            lines.append(f"complete -c baton {seen} -l {flag.removeprefix('--')}{values}")
    return "\n".join([*lines, ""])


_SHELLS: dict[str, Callable[[], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
