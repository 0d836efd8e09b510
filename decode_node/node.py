"""A decode node's parts: model, receiver and core, for the shell."""

from __future__ import annotations

from collections.abc import Callable

from decode_node.core import DecodeCore
from kv_transfer.ranks import ReceiverRanks, SenderRanks
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from node.parts import Base, RoleParts, assemble
from node.settings import NodeSettings
from node.shell import NodeParts


def make_parts(settings: NodeSettings, wake: Callable[[], None]) -> NodeParts:
    """Load the model and build the role on it. Raises ValueError, OSError or a BatonError, each readable for users."""
    return assemble(settings, wake, make_role)


def make_role(base: Base) -> RoleParts:
    """The role on its base: its movers and its core."""
    built, settings = base.built, base.settings
    verify = settings.verify_transfers
    mover = KvReceiver(base.transport, base.staging, built.pool_bytes, built.layout, verify=verify)
    receiver = ReceiverRanks([mover])
    staging, transport = base.make_outward(settings.num_outward_slots)
    sender = SenderRanks([KvSender(transport, staging, built.pool_bytes, built.layout, verify=verify)])
    core = DecodeCore(
        built.engine,
        receiver,
        sender,
        incarnation=base.incarnation,
        max_waiting=settings.max_waiting,
        max_deadline_s=settings.request_timeout,
        grammars=base.grammars,
        processors=base.processors,
    )
    return RoleParts(core, receiver, (sender, [transport.info()]), count_damaged=lambda: receiver.num_damaged_pieces)
