"""The one place of conversion between `baton.messages` and protobuf.

`write_*` takes a message and gives its protobuf; `read_*` is the reverse and checks what a peer of another version, or
a broken one, may have sent: whatever does not make sense raises InvalidRequest, naming the field. Token ids travel
packed, little-endian uint32 each.

This is the one place where a message is checked by itself. `Limits` are what its reader can take beside: a node's
vocabulary and context, the longest deadline. What depends on a state (is this lease this peer's?) the state machines
check. `work_of` says whose failure a message is that makes no sense.
"""

from baton.wire.handoffs import (
    FromDecode,
    FromPrefill,
    read_decode_message,
    read_prefill_message,
    write_decode_message,
    write_prefill_message,
)
from baton.wire.limits import Limits
from baton.wire.nodes import read_node_info, write_kv_audit, write_node_info
from baton.wire.sessions import (
    NodeToRouter,
    RouterToNode,
    read_node_message,
    read_router_message,
    write_node_message,
    write_router_message,
)
from baton.wire.values import (
    pack_tokens,
    read_error,
    read_finish_reason,
    read_logprobs,
    read_work,
    unpack_tokens,
    work_of,
    write_error,
    write_finish_reason,
    write_logprobs,
    write_work,
)

__all__ = [
    "Limits",
    "work_of",
    "RouterToNode",
    "NodeToRouter",
    "write_router_message",
    "read_router_message",
    "write_node_message",
    "read_node_message",
    "FromPrefill",
    "FromDecode",
    "write_prefill_message",
    "read_prefill_message",
    "write_decode_message",
    "read_decode_message",
    "write_node_info",
    "read_node_info",
    "write_kv_audit",
    "pack_tokens",
    "unpack_tokens",
    "write_work",
    "read_work",
    "write_error",
    "read_error",
    "write_logprobs",
    "read_logprobs",
    "write_finish_reason",
    "read_finish_reason",
]
