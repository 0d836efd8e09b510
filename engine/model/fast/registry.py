"""All pieces in order, and the check of the whole model after them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.model.fast.expert_sums import fuse_expert_sums
from engine.model.fast.experts import fuse_experts, fuse_routing
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.linears import fuse_linears, fuse_qkv
from engine.model.fast.mlp import fuse_gate_up
from engine.model.fast.norms import fuse_norms
from engine.model.fast.packing import pack_products
from engine.model.fast.residual import fuse_residuals
from engine.model.fast.rotary import fuse_head_norms, fuse_rotation, fuse_tables
from engine.model.fast.sequence_parallel import divide_rows
from engine.model.fast.sums import fuse_sums
from engine.model.fast.tally import FusedReport, Tally
from engine.model.fast.target import Target
from engine.model.linear_method import method_of
from engine.model.probe import Probe
from engine.model.tolerance import rounding

log = logging.getLogger(__name__)

Piece = Callable[[Target, Tally], None]

# Later pieces build on earlier ones: `linear` takes layers that no group has absorbed, sums of experts need experts
# that can leave them, head norms and residuals need known norms, sums over ranks need a known residual, divided rows
# need norms that make all of these.
PIECES: dict[str, Piece] = {
    "qkv": fuse_qkv,
    "gate_up": fuse_gate_up,
    "linear": fuse_linears,
    "experts": fuse_experts,
    "routing": fuse_routing,
    "expert_sum": fuse_expert_sums,
    "rms_norm": fuse_norms,
    "rotary_table": fuse_tables,
    "qk_norm": fuse_head_norms,
    "rope": fuse_rotation,
    "residual_norm": fuse_residuals,
    "sum_norm": fuse_sums,
    "sequence_parallel": divide_rows,
}

_REPORT = "baton_fused"


@torch.inference_mode()
def apply(model: PreTrainedModel, probed: Probe, max_model_len: int) -> FusedReport:
    """Put fast modules into the model; once, after `engine.model.probe.probe` and before `attention.attach`.

    Modules for which a piece does not agree are left unchanged and logged. If the logits of a few tokens differ
    afterwards, all pieces are undone. Never raises because of a model's structure. Finally, weights change into the
    layout of the fastest products (on a CPU; on a GPU, 4-bit weights only), and the modules' parameters for them become
    empty.
    """
    if (done := model.__dict__.get(_REPORT)) is not None:
        report: FusedReport = done
        return report
    began = time.monotonic()
    target = Target(model, probed.layers, max_model_len)
    report = FusedReport()
    expected = logits_as_served(target, probed.kv)
    for name, piece in PIECES.items():
        report.pieces[name] = _apply_one(name, piece, target)
    _check_whole(target, probed, expected, report)
    if report.taken_back is None:
        packed = pack_products(target)
        report.num_packed, report.packed_bytes = len(packed), sum(packed)
    model.__dict__[_REPORT] = report
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the weights' former memory
    log.info("fused: %s seconds=%.2f", report, time.monotonic() - began)
    return report


def why_not_captured(model: PreTrainedModel) -> str | None:
    """Why steps of the model may not be captured in CUDA graphs: some experts still run transformers' own forward,
    which may ask the device how many tokens chose each expert. None: no known reason."""
    report: FusedReport | None = model.__dict__.get(_REPORT)
    experts = report.pieces.get("experts") if report is not None else None
    if report is None or experts is None or not experts.found:
        return None
    if report.taken_back is not None:
        return f"experts: {report.taken_back}"
    return next((f"{name}: {why}" for name, why in experts.refused), None)


def _apply_one(name: str, piece: Piece, target: Target) -> Tally:
    mark, tally = target.mark(), Tally()
    try:
        piece(target, tally)
    except Exception as error:
        target.back_to(mark)
        log.warning("piece %s left out: %s", name, error, exc_info=True)
        return Tally(refused=[("all", str(error))])
    for module, why in tally.refused:
        log.info("not fused: %s of %s: %s", name, module, why)
    return tally


def _check_whole(target: Target, probed: Probe, expected: torch.Tensor, report: FusedReport) -> None:
    methods = [method for method in map(method_of, target.model.modules()) if method is not None]
    bound = max(tolerance.logits for tolerance in (rounding(target.model.dtype), *(m.tolerance for m in methods)))
    try:
        difference = logits_as_served(target, probed.kv) - expected
        error = float((difference.norm(dim=-1) / expected.norm(dim=-1)).median())
        report.taken_back = None if error <= bound else f"logits differ by {error:.2g}"
    except Exception as failure:  # noqa: BLE001 - see _apply_one
        report.taken_back = str(failure) or repr(failure)
    if report.taken_back is not None:
        target.patches.back_to(0)
        log.warning("fast modules are off, the model's own are used: %s", report.taken_back)


def packed_bytes(model: nn.Module) -> int:
    """The bytes of weights that are no longer parameters of the model; see `pack_products`."""
    report: FusedReport | None = model.__dict__.get(_REPORT)
    return report.packed_bytes if report is not None else 0
