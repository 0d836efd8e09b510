"""What every baton process shares: this package imports neither torch nor any other package of the project.

`v1/` is the wire format (protobuf, gRPC). The modules beside it are written by hand: the error tree (`errors`), what a
request asks for (`sampling`), the shape of KV blocks (`layout`) and their hashes (`block_hash`), the messages that the
roles' state machines exchange (`messages`) with their only conversion to and from the wire (`wire`), settings
(`settings`) and telemetry (`telemetry`).
"""

__version__ = "0.1.0"

PROTOCOL_VERSION = 4
"""Spoken in the first message of each stream. Raised when an old peer would misread a new one."""
