"""Common base of the transports whose two ends agree on each message over TCP connections."""
