"""Host memory from which a device reads arrays that are uploaded, used over and over."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 16


class Mark(Protocol):
    """A point in the device's work, such as a torch.cuda.Event."""

    def record(self) -> None:
        """Mark the work queued so far."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark; not at all before the first `record`."""


class UploadRing:
    """The memory is used in segments, each of which is marked when it is full, and used again when the device has
    passed that mark. The device is never so far behind that this would be a wait: a step uploads some kilobytes, and
    one or two steps are in flight. So an upload needs no event and no memory of its own, for which the interpreter
    would be given up and waited for, with other threads that want it.

    memory: [num_bytes], uint8, a multiple of 16 bytes for each mark. One thread, and one stream of the device.
    """

    def __init__(self, memory: NDArray[np.uint8], marks: Seq[Mark]) -> None:
        self._segments = np.split(memory, len(marks))
        self._marks = marks
        self._current = 0
        self._num_used = 0
        self.most_bytes = len(self._segments[0]) // 4
        """Of an array that has a place here: in a segment, less than a quarter remains unused."""

    def put(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """A copy of the array, of `most_bytes` at most, which stays as it is until the device has done what is queued
        before the next call."""
        num_bytes = array.nbytes
        assert num_bytes <= self.most_bytes
        if self._num_used + num_bytes > len(self._segments[0]):
            self._marks[self._current].record()
            self._current = (self._current + 1) % len(self._segments)
            self._marks[self._current].synchronize()
            self._num_used = 0
        place = self._segments[self._current][self._num_used : self._num_used + num_bytes]
        self._num_used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        copy = place.view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy
