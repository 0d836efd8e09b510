"""Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before triton is imported."""

import os

import torch

import tests.machines  # noqa: F401 - has a profile for --hypothesis-profile

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
