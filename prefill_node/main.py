"""The command `baton-prefill`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from baton.messages import NodeRole
from baton.settings import parse
from engine.node.run import run_node
from engine.node.settings import NodeSettings
from engine.node.shell import NodeParts
from prefill_node.server import PREFILL_SIDE
from prefill_node.settings import PrefillSettings


def main() -> NoReturn:
    """Serve until a signal. Exit codes are those of `engine.node.run`."""
    run_node(parse(PrefillSettings), NodeRole.PREFILL, PREFILL_SIDE, _make_parts)


def _make_parts(settings: NodeSettings, wake: Callable[[], None]) -> NodeParts:
    from prefill_node.node import make_parts  # torch takes seconds to import: not before a bad flag or port is told

    return make_parts(settings, wake)


if __name__ == "__main__":
    main()
