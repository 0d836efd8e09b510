"""Fast modules: pieces of a model computed with fewer and faster kernels, wherever a probe says that they are exact.

Each piece is a function of a few dozen lines that looks for modules of a shape, not of a class: siblings q_proj, k_proj
and v_proj, a gated MLP, an RMS norm. It tries its own way on random inputs with the layer's own weights, compares with
the module's, and puts itself in its place where they agree. What it cannot do is left as transformers has it. No
weight is copied for good: fused ones share their memory with the parameters they were made of.
"""

from engine.model.fast.registry import apply
from engine.model.fast.tally import FusedReport

__all__ = ["FusedReport", "apply"]
