"""What a step carries for each token besides its id: an adapter, a mask, positions of several axes.

All of it takes one path, from the sequence to the model's forward:

    Sequence.extensions[name] -> BatchExtension.fill, into the step's one upload -> ModelInputs.extensions[name]

The upload of a CUDA graph is its static input, so graphs support extensions as well. A runner gets its model's
extensions at the start. A sequence keeps its values when it is preempted, and its forks inherit them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step import Chunk


class BatchExtension(Protocol):
    """Numbers for each token of a batch, under a name that is the forward's keyword argument.

    width: numbers per token. dtype: of 4 bytes, int32 or float32.
    """

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def fill(self, chunk: Chunk, out: NDArray[Any]) -> None:
        """Write the values of the chunk's tokens to `out`; the sequence may have none under this name.
        out: [chunk.length, width], initially zeros, like the values of padding tokens."""

    def argument(self, values: Tensor) -> Tensor:
        """The argument of the model's forward, a view of `values`. values: [num_tokens, width], on the device."""


def torch_dtype(extension: BatchExtension) -> torch.dtype:
    return torch.float32 if extension.dtype == np.float32 else torch.int32
