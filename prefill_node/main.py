"""The command `baton-prefill`."""

from __future__ import annotations

import sys
from typing import NoReturn

from baton.settings import parse
from prefill_node.settings import PrefillSettings


def main() -> NoReturn:
    """Serve until a signal. Exit codes are those of `engine.node.run`."""
    settings = parse(PrefillSettings)
    from prefill_node.node import run  # torch takes seconds to import: not before a bad flag is told

    sys.exit(run(settings))


if __name__ == "__main__":
    main()
