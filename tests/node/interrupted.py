"""A node that is interrupted while it starts: `load`, where the KeyboardInterrupt is lost, since libraries drop what is
raised in their callbacks; `container`, there too, as its first process; or `warm-up`, on the engine's thread."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

from baton.node_info import NodeRole
from node.base import Base
from node.parts import RoleParts
from node.run import run_node
from node.settings import NodeSettings
from prefill_node.node import make_role
from prefill_node.server import PREFILL_SIDE

OWN = os.getpid()
SETTINGS = NodeSettings(model="baton-tiny", engine="simulated", profile="h200-8b", step_timeout=5.0)


def in_load(base: Base) -> NoReturn:
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(OWN, signal.SIGINT)
    raise ValueError("it has gone on")


def in_warm_up(base: Base) -> RoleParts:
    def warm_up() -> None:
        os.kill(OWN, signal.SIGINT)
        threading.Event().wait()

    parts = make_role(base)
    parts.mover.warm_up = warm_up
    return parts


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests are in the background
    if sys.argv[1] == "container":
        os.getpid = lambda: 1
    run_node(SETTINGS, NodeRole.PREFILL, PREFILL_SIDE, in_warm_up if sys.argv[1] == "warm-up" else in_load)
