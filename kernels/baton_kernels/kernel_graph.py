"""Kernels that are launched as CUDA graphs of their own, on streams beside the engine's.

If they were launched there by themselves, all CUDA graphs of the process would be slower for good: each of their
kernels would begin 0.3 us later. Launches of graphs do not cause that (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from baton_kernels.cuda_driver import driver
from baton_kernels.streams import capture_stream

_capturing = threading.Lock()
"""Held while a thread captures, since all capture on one stream of their device."""


class KernelGraph:
    """A kernel whose first arguments, addresses, and number of programs change from launch to launch; everything else
    is as captured. Its launches run one after another, whichever streams they are on. Callable from any thread.

    device: the current one, whose context is current, too. launch: launches the kernel on the given stream
    (`cuda_stream`). Raises CudaError.
    """

    def __init__(self, device: torch.device, launch: Callable[[int], object], num_addresses: int) -> None:
        self._driver = driver()
        self._context = self._driver.context()
        graph = self._capture(capture_stream(device).cuda_stream, launch)
        weakref.finalize(self, self._driver.destroy_graph, graph).atexit = False  # the driver may be gone by then
        self._node, captured, num_arguments = self._driver.only_kernel(graph)
        self._executable = self._driver.instantiate(graph)
        weakref.finalize(self, self._driver.destroy_executable, self._executable).atexit = False
        self._addresses: Any = (ctypes.c_uint64 * num_addresses)()
        at = ctypes.addressof(self._addresses)
        own = [at + index * ctypes.sizeof(ctypes.c_uint64) for index in range(num_addresses)]
        arguments = (ctypes.c_void_p * num_arguments)(*own, *captured.kernel_params[num_addresses:num_arguments])
        captured.kernel_params = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        self._parameters, self._arguments = captured, arguments
        self._launching = threading.Lock()  # from the change of its parameters to the launch with them

    def launch(self, addresses: tuple[int, ...], num_programs: int, stream: int) -> None:
        """num_programs: along the grid's first dimension. stream: its `cuda_stream`. Raises CudaError."""
        if not self._driver.context():  # the thread's first use of a device
            self._driver.make_current(self._context)
        with self._launching:
            self._addresses[:] = addresses
            self._parameters.grid[0] = num_programs
            self._driver.set_parameters(self._executable, self._node, self._parameters)
            self._driver.launch_graph(self._executable, stream)

    def _capture(self, stream: int, launch: Callable[[int], object]) -> int:
        with _capturing:
            self._driver.begin_capture(stream)
            try:
                launch(stream)
            except BaseException:
                self._driver.destroy_graph(self._driver.end_capture(stream))
                raise
            return self._driver.end_capture(stream)
