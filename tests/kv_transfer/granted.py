"""Two nodes, one of which may store into a slot of the other's."""

from __future__ import annotations

from typing import Any

from tests.kv_transfer.rig import Rig

OLD, STORED, LATE = 0x11, 0x22, 0x33


def granted_pair(rig: Rig) -> tuple[Any, Any, int, int]:
    """Two nodes, a slot of each, and the receiver's granted for tag 1."""
    sender, receiver = rig.node("raw"), rig.node("raw")
    rig.link(sender, receiver)
    source, target = sender.call("fill", OLD), receiver.call("fill", 0)
    receiver.call("post", sender.name, 1, target)
    while not sender.call("place", receiver.name, 1, STORED):
        pass  # a grant that takes longer than `place` waits
    return sender, receiver, source, target
