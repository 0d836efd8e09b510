"""The structure of a UCX worker's address.

UCX reads an address without bounds checks, and aborts the process on an invalid one. So a peer's address is parsed
here first, as `ucp_address_unpack` does (src/ucp/wireup/address.c of UCX 1.21, version 1, with a worker's uuid). That
rejects malformed addresses; a well-formed but false one still passes.

    header, uuid                        8 and 64 bits
    for each device     md index        1 bit: it has no transports; 7 bits
                        length          1 bit: it is the last; 2 bits, for each of which a byte follows; 5 bits
                        address
      for each transport    name, attributes        16 and 128 bits
                            length                  1 bit: it is the last; 1 bit: endpoints follow; 6 bits
                            address
"""

from __future__ import annotations

_HEADER = 0x20
_START = 1 + 8
_LAST = 0x80
_NO_TRANSPORTS = 0x80
_NUM_PATHS, _SYS_DEVICE = 0x40, 0x20
_DEVICE_LENGTH = 0x1F
_TRANSPORT_BYTES = 2 + 16
_HAS_ENDPOINTS = 0x40
_LENGTH = 0x3F
_MOST_TRANSPORTS = 64
"""Half of UCX's own limit; the addresses of nodes have a handful."""


def is_worker_address(address: bytes) -> bool:
    """Whether this is exactly one complete worker address, in the format known here."""
    try:
        return address[0] == _HEADER and _end_of(address) == len(address)
    except (IndexError, ValueError):
        return False


def _end_of(address: bytes) -> int:
    """The offset of its end. Raises IndexError or ValueError for any other structure."""
    at, num_transports, is_last = _START, 0, False
    while not is_last:
        has_transports, length = not address[at] & _NO_TRANSPORTS, address[at + 1]
        is_last = bool(length & _LAST)
        at += 2 + bool(length & _NUM_PATHS) + bool(length & _SYS_DEVICE) + (length & _DEVICE_LENGTH)
        while has_transports:
            at += _TRANSPORT_BYTES
            length, num_transports = address[at], num_transports + 1
            if length & _HAS_ENDPOINTS or num_transports > _MOST_TRANSPORTS:
                raise ValueError("not a worker's")
            has_transports = not length & _LAST
            at += 1 + (length & _LENGTH)
    return at
