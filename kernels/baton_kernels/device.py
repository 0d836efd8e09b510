"""What kernels must know about a device to divide their work."""

from __future__ import annotations

import torch


def num_sms(device: torch.device) -> int:
    """The number of SMs of the device; a small number in Triton's interpreter."""
    if device.type != "cuda":
        return 4
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _NUM_SMS:
        _NUM_SMS[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _NUM_SMS[index]


_NUM_SMS: dict[int, int] = {}
