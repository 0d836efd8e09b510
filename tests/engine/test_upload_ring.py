"""UploadRing: what the device has yet to read is never overwritten."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.model import upload
from engine.model.upload_ring import UploadRing

NUM_SEGMENTS, SEGMENT_BYTES = 3, 256


@dataclass
class Device:
    """Reads arrays in order; `run` catches up with what is queued. Marks are the numbers of reads queued before."""

    queued: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = field(default_factory=list)
    num_done: int = 0

    def run(self, until: int) -> None:
        while self.num_done < until:
            there, wanted = self.queued[self.num_done]
            assert np.array_equal(there, wanted)
            self.num_done += 1


@dataclass
class DeviceMark:
    device: Device
    at: int = 0

    def record(self) -> None:
        self.at = len(self.device.queued)

    def synchronize(self) -> None:
        self.device.run(self.at)


def make() -> tuple[UploadRing, Device]:
    device, memory = Device(), np.zeros(NUM_SEGMENTS * SEGMENT_BYTES, np.uint8)
    return UploadRing(memory, [DeviceMark(device) for _ in range(NUM_SEGMENTS)]), device


DTYPES = st.sampled_from([np.uint8, np.int32, np.int64, np.float32])


@given(st.lists(st.tuples(st.integers(0, SEGMENT_BYTES // 4), DTYPES, st.integers(0, 3)), max_size=200))
def test_an_array_stays_until_the_device_has_read_it(uploads: list[tuple[int, type[np.generic], int]]) -> None:
    ring, device = make()
    for number, (num_bytes, dtype, num_read) in enumerate(uploads):
        array = np.full(num_bytes // np.dtype(dtype).itemsize, number % 100, dtype)
        copy = ring.put(array)
        assert copy.ctypes.data % 16 == 0
        device.queued.append((copy, array.copy()))
        device.run(min(device.num_done + num_read, len(device.queued)))
    device.run(len(device.queued))


def test_the_host_waits_only_for_a_device_that_is_a_ring_behind() -> None:
    ring, device = make()
    array = np.zeros(SEGMENT_BYTES // 4, np.uint8)
    for _ in range(NUM_SEGMENTS * 4):
        device.queued.append((ring.put(array), array))
    assert device.num_done == 0
    ring.put(array)
    assert device.num_done == 4


def test_an_array_may_have_any_shape_and_strides() -> None:
    ring, _ = make()
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2]
    assert ring.put(array).tolist() == array.tolist()


def test_a_large_array_has_no_place() -> None:
    ring, _ = make()
    with pytest.raises(AssertionError):
        ring.put(np.zeros(ring.most_bytes + 1, np.uint8))


def test_each_thread_has_memory_of_its_own() -> None:
    """Prompts of a model in stages are scored on another thread and stream than steps are launched on."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: upload._pinned.in_use).result()
    assert other is not upload._pinned.in_use
