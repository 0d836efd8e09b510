"""What a step carries for each token beside its id: an adapter, a mask, positions of several axes.

One way for all of it, from the sequence to the model's forward:

    Sequence.extensions[name] -> BatchExtension.fill, into the step's one upload -> ModelInputs.extensions[name]

The upload of a CUDA graph is its static input, so an extension is in the graph as well. A runner is told at its start
which ones its model takes. A sequence keeps its values when it is preempted, and gives them to its forks.
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
        """Write what the chunk's tokens carry, which may be for a sequence without a value of this name.
        out: [chunk.length, width], zeros, as are all tokens that pad a batch."""

    def argument(self, values: Tensor) -> Tensor:
        """As the model's forward takes it, a view. values: [num_tokens, width], on the device."""


def torch_dtype(extension: BatchExtension) -> torch.dtype:
    return torch.float32 if extension.dtype == np.float32 else torch.int32
