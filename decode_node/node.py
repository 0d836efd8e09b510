"""A decode node's parts: model, receiver and core, for the shell."""

from __future__ import annotations

from decode_node.core import DecodeCore
from kv_transfer.ranks import ReceiverRanks, SenderRanks
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from node.base import Base
from node.parts import RoleParts


def make_role(base: Base) -> RoleParts:
    """The role on its base: its movers and its core."""
    receiver = ReceiverRanks(base.movers(KvReceiver, base.links))
    outward = base.make_links(base.settings.num_outward_slots)
    sender = SenderRanks(base.movers(KvSender, outward))
    addresses = [link.transport.info() for link in outward]
    core = DecodeCore(base.built.engine, receiver, sender, base.role_options)
    return RoleParts(core, receiver, (sender, addresses), count_damaged=lambda: receiver.num_damaged_pieces)
