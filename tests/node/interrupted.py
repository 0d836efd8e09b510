"""A node that is interrupted while it loads, where the KeyboardInterrupt is lost: libraries drop what is raised in
their callbacks."""

from __future__ import annotations

import contextlib
import os
import signal

from baton.node_info import NodeRole
from node.run import MakeParts, run_node
from node.settings import NodeSettings
from prefill_node.server import PREFILL_SIDE


def load() -> MakeParts:
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    raise ValueError("it has gone on")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are in the background
    run_node(NodeSettings(model="nowhere"), NodeRole.PREFILL, PREFILL_SIDE, load)
