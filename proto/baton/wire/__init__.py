"""The only conversion between `baton.messages`, `baton.handoff_messages`, `baton.node_info` and protobuf.

`write_*` converts a message to protobuf. `read_*` is the reverse, and validates it, as a broken peer or one of another
version may have sent it: a malformed message raises InvalidRequest that names the field. Token ids are sent packed, as
little-endian uint32.

A message by itself is checked only here. `Limits` are the reader's own additional limits: a node's vocabulary and
context, the longest deadline. The state machines check what depends on their state (does this lease belong to this
peer?). `attempt_of` returns the attempt that a malformed message ends.
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
from baton.wire.nodes import (
    read_generation_defaults,
    read_node_info,
    write_generation_defaults,
    write_kv_audit,
    write_node_info,
)
from baton.wire.prompt_logprobs import read_prompt_logprobs, write_prompt_logprobs
from baton.wire.sampling import read_processors, read_structured, write_processors, write_structured
from baton.wire.sessions import (
    NodeToRouter,
    RouterToNode,
    join_router_messages,
    read_node_message,
    read_router_message,
    split_router_message,
    write_node_message,
    write_router_message,
)
from baton.wire.values import (
    attempt_of,
    pack_tokens,
    read_attempt_id,
    read_error,
    read_finish_reason,
    read_logprobs,
    unpack_tokens,
    write_attempt_id,
    write_error,
    write_finish_reason,
    write_logprobs,
)

__all__ = [
    "Limits",
    "attempt_of",
    "RouterToNode",
    "NodeToRouter",
    "write_router_message",
    "read_router_message",
    "join_router_messages",
    "split_router_message",
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
    "write_generation_defaults",
    "read_generation_defaults",
    "write_kv_audit",
    "pack_tokens",
    "unpack_tokens",
    "write_attempt_id",
    "read_attempt_id",
    "write_error",
    "read_error",
    "write_logprobs",
    "read_logprobs",
    "write_prompt_logprobs",
    "read_prompt_logprobs",
    "write_finish_reason",
    "read_finish_reason",
    "write_structured",
    "read_structured",
    "write_processors",
    "read_processors",
]
