"""The language that every baton process speaks: no torch, and nothing else of ours, is imported here.

`v1/` is the wire (protobuf, gRPC); the modules beside it are the hand-written part: the error tree (`errors`), what a
request asks for (`sampling`), the shape of KV blocks (`layout`) and their hashes (`block_hash`), the messages that the
roles' state machines take and give (`messages`) with their one conversion to and from the wire (`wire`), settings
(`settings`) and telemetry (`telemetry`).
"""

__version__ = "0.1.0"

PROTOCOL_VERSION = 3
"""Spoken in the first message of each stream. Raised when an old peer would misread a new one."""
