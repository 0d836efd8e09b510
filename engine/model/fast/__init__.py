"""Fast modules: parts of a model computed with fewer and faster kernels, wherever a probe finds that results agree.

Each piece is a function of a few dozen lines that finds modules by their structure, not by their class: siblings
q_proj, k_proj and v_proj, a gated MLP, an RMS norm. It compares its own result with the module's, on random inputs with
the layer's own weights, and replaces the module's forward where they agree. Everything else stays as in transformers.
No weight is kept twice: fused weights share their memory with the parameters that they were made from.
"""

from engine.model.fast.registry import apply, packed_bytes, why_not_captured
from engine.model.fast.tally import FusedReport

__all__ = ["FusedReport", "apply", "packed_bytes", "why_not_captured"]
