"""Command lines of baton in files for operators: parsed by the commands' own settings, as the processes would."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from baton.settings import Settings, parse
from decode_node.settings import DecodeSettings
from prefill_node.settings import PrefillSettings
from router.settings import RouterSettings

SETTINGS: dict[str, type[Settings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}


def parsed(command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> Settings:
    """The settings of `baton COMMAND...` with nothing in the environment but `env`. Files that flags name are sought
    under `folder`. Fails if a flag is unknown or its value is bad."""
    role, *flags = command
    moved = [re.sub(r"=/", f"={folder}/", flag) for flag in flags]
    variables = {name: re.sub(r"^/", f"{folder}/", value) for name, value in (env or {}).items()}
    with patch.dict("os.environ", variables, clear=True):
        try:
            return parse(SETTINGS[role], moved)
        except SystemExit as error:
            raise AssertionError(f"baton {' '.join(command)}: exits with {error.code}") from error


def put_file(folder: Path, path: str, text: str = "a-secret-of-many-bytes") -> None:
    """Where `parsed` finds the file of an absolute path."""
    file = folder / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
