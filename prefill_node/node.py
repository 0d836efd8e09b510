"""A prefill node's parts: model, sender and core, for the shell."""

from __future__ import annotations

from collections.abc import Callable

import kv_transfer
from baton.messages import NodeRole
from engine.model.memory import out_of_memory
from engine.node.build import build, count, describe, new_incarnation
from engine.node.settings import NodeSettings
from engine.node.shell import NodeParts
from engine.node.slots import slot_sizes
from kv_transfer.parts import slot_bytes_for
from kv_transfer.ranks import SenderRanks
from kv_transfer.sender import KvSender
from prefill_node.core import PrefillCore

WHOLE_TOKENS = 512
"""A last chunk of so few is not worth several parts: 64 MiB of an 8B model's KV take 0.2 ms over NVLink."""


def make_parts(settings: NodeSettings, wake: Callable[[], None]) -> NodeParts:
    """Load the model and make the role around it. Raises ValueError, OSError or a BatonError for a person."""
    built = build(settings, wake)
    sizes = slot_sizes(settings, built.layout.block_bytes, built.device.type == "cuda")
    slot_bytes = slot_bytes_for(sizes.part_blocks, built.layout.block_bytes)
    with out_of_memory("--kv-slots, --kv-slot-blocks: lower them, the staging slots do not fit"):
        staging = kv_transfer.staging_for(settings.transport, sizes.num_slots, slot_bytes, built.device)
    interface, host, secret = settings.transfer_interface, settings.listen.host, settings.trust().secret
    transport = kv_transfer.create(settings.transport, staging, wake, interface, host, secret)
    verify = settings.verify_transfers
    sender = SenderRanks([KvSender(transport, staging, built.pool_bytes, built.layout, verify=verify)])
    incarnation = new_incarnation()
    core = PrefillCore(
        built.engine,
        sender,
        incarnation=incarnation,
        max_waiting=settings.max_waiting,
        max_deadline_s=settings.request_timeout,
        layer_groups=min(built.layer_groups, built.layout.num_layers),
        whole_tokens=WHOLE_TOKENS if built.graph_sizes else 0,
    )

    def warm_up() -> None:
        built.warm_up()
        sender.warm_up()

    return NodeParts(
        role=core,
        warm_up=warm_up,
        transport=sender,
        info=describe(settings, NodeRole.PREFILL, built, incarnation, [transport.info()]),
        tokenizer=built.tokenizer.json,
        part_blocks=sender.part_blocks,
        count=lambda: count(built.engine),
        num_slots=sender.num_slots,
        count_free_slots=lambda: sender.num_free_slots,
    )
