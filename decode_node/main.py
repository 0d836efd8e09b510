"""The command `baton-decode`."""

from __future__ import annotations

import sys
from typing import NoReturn

from baton.settings import parse
from decode_node.settings import DecodeSettings


def main() -> NoReturn:
    """Serve until a signal. Exit codes are those of `engine.node.run`."""
    settings = parse(DecodeSettings)
    from decode_node.node import run  # torch takes seconds to import: not before a bad flag is told

    sys.exit(run(settings))


if __name__ == "__main__":
    main()
