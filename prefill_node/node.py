"""A prefill node's parts: model, sender and core, for the shell."""

from __future__ import annotations

from kv_transfer.ranks import SenderRanks
from kv_transfer.sender import KvSender
from node.base import Base
from node.parts import RoleParts
from prefill_node.core import PrefillCore

WHOLE_TOKENS = 512
"""A last chunk of at most this many tokens travels as a whole: its KV in an 8B model, 64 MiB, takes 0.2 ms over
NVLink."""


def make_role(base: Base) -> RoleParts:
    """The role on its base: its mover and its core."""
    built = base.built
    sender = SenderRanks(base.movers(KvSender, base.links))
    core = PrefillCore(
        built.engine,
        sender,
        base.role_options,
        layer_groups=min(built.layer_groups, built.layout.num_layers),
        whole_tokens=WHOLE_TOKENS if built.graph_sizes else 0,
    )
    return RoleParts(core, sender)
