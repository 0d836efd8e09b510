"""The command `baton-prefill`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from baton.node_info import NodeRole
from baton.settings import parse
from node.run import run_node
from prefill_node.node import make_role
from prefill_node.server import PREFILL_SIDE
from prefill_node.settings import PrefillSettings


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until a signal. Exit codes are those of `node.run`."""
    run_node(parse(PrefillSettings, argv), NodeRole.PREFILL, PREFILL_SIDE, make_role)


if __name__ == "__main__":
    main()
