"""The command `baton-decode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from baton.messages import NodeRole
from baton.settings import parse
from decode_node.server import DECODE_SIDE
from decode_node.settings import DecodeSettings
from engine.node.run import run_node
from engine.node.settings import NodeSettings
from engine.node.shell import NodeParts


def main() -> NoReturn:
    """Serve until a signal. Exit codes are those of `engine.node.run`."""
    run_node(parse(DecodeSettings), NodeRole.DECODE, DECODE_SIDE, _make_parts)


def _make_parts(settings: NodeSettings, wake: Callable[[], None]) -> NodeParts:
    from decode_node.node import make_parts  # torch takes seconds to import: not before a bad flag or port is told

    return make_parts(settings, wake)


if __name__ == "__main__":
    main()
