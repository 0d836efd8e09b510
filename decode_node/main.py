"""The command `baton-decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from baton.node_info import NodeRole
from baton.settings import parse
from decode_node.node import make_role
from decode_node.server import DECODE_SIDE
from decode_node.settings import DecodeSettings
from node.run import run_node


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until a signal. Exit codes are those of `node.run`."""
    run_node(parse(DecodeSettings, argv), NodeRole.DECODE, DECODE_SIDE, make_role)


if __name__ == "__main__":
    main()
