"""After a day of requests of every kind a cluster holds what it held at its beginning, and its turns take as long."""

from __future__ import annotations

import pytest

from router.requests.kv_flows import MAX_PAIRS
from tests.protocol.soak import Reading, Soak

MIB = 1 << 20
BOUNDED = {"router.kv_flows._totals": MAX_PAIRS}
"""What may grow up to a bound, since each start of a node makes new pairs."""


def check_flat(first: Reading, last: Reading) -> None:
    grown = {path: (first.sizes.get(path, 0), size) for path, size in last.sizes.items()}
    grown = {path: sizes for path, sizes in grown.items() if sizes[1] > max(2 * sizes[0] + 200, BOUNDED.get(path, 0))}
    assert not grown, "(then, now) of what has grown"
    assert last.num_descriptors <= first.num_descriptors
    assert last.num_threads <= first.num_threads
    assert last.turn_s <= 2 * first.turn_s + 100e-6  # of 0.2 ms; others may have the machine meanwhile
    assert last.resident_bytes - first.resident_bytes < 24 * MIB


def test_nothing_grows() -> None:
    soak = Soak(seed=1)
    first, *_, last = [soak.run(400) for _ in range(4)]
    check_flat(first, last)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_nothing_grows_in_200000_requests() -> None:
    soak = Soak(seed=2)
    readings = [soak.run(20_000) for _ in range(10)]
    for reading in readings:
        print(
            f"requests={reading.num_requests} rss_mib={reading.resident_bytes / MIB:.1f} fds={reading.num_descriptors} "
            f"threads={reading.num_threads} turn_us={reading.turn_s * 1e6:.1f} elements={sum(reading.sizes.values())}"
        )
    check_flat(readings[0], readings[-1])
