"""Code shared by all baton processes. This package imports neither torch nor any other package of the project.

`v1/` is the wire format (protobuf, gRPC). The other modules are written by hand: the error tree (`errors`), sampling
parameters (`sampling`), the shape of KV blocks (`layout`) and their hashes (`block_hash`), the messages that the roles'
state machines exchange (`messages`) and their only conversion to and from the wire (`wire`), streams that carry them
(`rpc`), what constrains an answer (`structured_output`), settings (`settings`), telemetry (`telemetry`) and the life of
a process (`process`).
"""

__version__ = "0.1.0"

PROTOCOL_VERSION = 7
"""Sent in the first message of each stream. Incremented when an old peer would misread messages of a new one."""
