"""Fast modules: put in only where they are exact, taken back when the whole is not, and nobody else's business."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3 import modeling_qwen3

from baton_kernels.gated_activation import Activation
from baton_kernels.unfinished import Scales, unfinished
from benchmarks.accuracy.random_models import MAX_MODEL_LEN
from engine.model import fast
from engine.model.attention import IMPLEMENTATION
from engine.model.fast import registry
from engine.model.fast.decoder import Decoder, LayerParts
from engine.model.fast.mlp import fuse_gate_up
from engine.model.fast.norm import Norm, RmsNorm
from engine.model.fast.residual import _finished_in_norms
from engine.model.fast.tally import Tally
from engine.model.fast.target import Target
from engine.model.linear_method import LinearMethod, Product, UnquantizedLinear
from engine.model.load import loader
from engine.model.load.checkpoint import Checkpoint
from engine.model.probe import probe
from tests.engine import tiny_models
from tests.engine.fused_models import built, check_same_as_own, fused, logits

torch.set_num_threads(1)


def test_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="engine.model.fast"):
        fused(built("granite"))
    lines = caplog.messages
    assert lines[-1].startswith(
        "fused: qkv 2/2, gate_up 2/2, linear 5/5, rms_norm 5/5, rotary_table 1/1, rope 2/2, residual_norm 0/2 seconds="
    )
    assert lines[0] == "not fused: residual_norm of layer 0: adds to the residual in another way"  # a multiplier


def test_weights_are_shared_not_copied() -> None:
    model = built("qwen2")
    fused(model)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for siblings in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        for name in {name for name, _ in siblings[0].named_parameters()}:
            storages = {getattr(module, name).untyped_storage().data_ptr() for module in siblings}
            total = sum(getattr(module, name).nbytes for module in siblings)
            assert len(storages) == 1
            assert getattr(siblings[0], name).untyped_storage().nbytes() == total


def test_weights_that_lie_together_already_stay_where_they_are() -> None:
    model = built("llama")
    mlp = model.model.layers[0].mlp
    whole = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = whole.chunk(2)
    fused(model)
    assert mlp.gate_proj.weight.data_ptr() == whole.data_ptr()
    assert mlp.up_proj.weight.data_ptr() == whole[192:].data_ptr()


def test_positions_on_several_axes_have_no_table(tmp_path: Path) -> None:
    """Each token of Qwen2.5-VL has three positions. All else is fused; modules for images are not called."""
    folder = tiny_models.save(tiny_models.WITH_IMAGES["qwen2_5_vl"], tmp_path)
    model = loader.load_model(Checkpoint.open(folder))
    own = logits(model, probe(model, MAX_MODEL_LEN))
    probed, report = fused(model)
    assert report.taken_back is None
    assert [report.pieces[name].fused for name in ("rotary_table", "rope", "residual_norm")] == [0, 2, 2]
    assert [name for name, _ in report.pieces["rotary_table"].refused if "Vision" not in name] == [
        "Qwen2_5_VLRotaryEmbedding"
    ]
    torch.testing.assert_close(logits(model, probed), own, atol=1e-4, rtol=1e-4)


def test_another_model_of_the_class_is_left_alone() -> None:
    """Even while the fused one computes: the rotation of a modeling file is never replaced for others."""
    rotate = modeling_qwen3.apply_rotary_pos_emb
    model, other = built("qwen3"), built("qwen3", "eager")
    ids = torch.arange(9)[None]
    before = other(input_ids=ids).logits
    seen = []
    probed, _ = fused(model)
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(other(input_ids=ids).logits))
    logits(model, probed)
    assert modeling_qwen3.apply_rotary_pos_emb is rotate
    assert seen
    for one in seen:
        torch.testing.assert_close(one, before, atol=0, rtol=0)


def test_applied_once() -> None:
    model = built("llama")
    probed, report = fused(model)
    assert fast.apply(model, probed, MAX_MODEL_LEN) is report


# ---- what is not exact ----


def centred(module: nn.Module) -> None:
    """A norm that looks like any other and subtracts the mean."""
    own = type(module).forward
    module.forward = lambda x: own(module, x - x.mean(-1, keepdim=True))


def test_a_norm_that_computes_something_else() -> None:
    def mutate(model: PreTrainedModel) -> None:
        centred(model.model.layers[1].input_layernorm)

    model = built("llama")
    mutate(model)
    probed, report = fused(model)
    assert report.taken_back is None
    assert report.pieces["rms_norm"].refused == [("model.layers.1.input_layernorm", "computes something else")]
    assert report.pieces["residual_norm"].fused == 0
    check_same_as_own(model, probed, "llama", mutate)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(approximate="tanh"), nn.GELU(), nn.SiLU()], ids=str)
def test_activations(act: nn.Module) -> None:
    def mutate(model: PreTrainedModel) -> None:
        model.model.layers[0].mlp.act_fn = act

    model = built("llama")
    mutate(model)
    probed, report = fused(model)
    assert report.pieces["gate_up"].fused == (1 if isinstance(act, nn.ReLU) else 2)
    check_same_as_own(model, probed, "llama", mutate)


def test_an_mlp_of_another_form() -> None:
    def mutate(model: PreTrainedModel) -> None:
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda x: mlp.down_proj(F.silu(mlp.gate_proj(x)).clamp(max=0.5) * mlp.up_proj(x))

    model = built("llama")
    mutate(model)
    probed, report = fused(model)
    assert report.pieces["gate_up"].refused == [("model.layers.0.mlp", "differs")]
    check_same_as_own(model, probed, "llama", mutate)


def norm_after_rotation(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention of Hunyuan's order, on Qwen3's modules."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (proj(hidden_states).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    q, k = self.q_norm(q), self.k_norm(k)
    out, _ = attention_function(self, q, k, v, attention_mask, scaling=self.scaling)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin)


def attention_function(*args: object, **kwargs: object) -> tuple[Tensor, None]:
    functions: Any = modeling_qwen3.ALL_ATTENTION_FUNCTIONS
    return functions[IMPLEMENTATION](*args, **kwargs)


def test_norms_after_the_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", norm_after_rotation)
    model = built("qwen3")
    probed, report = fused(model)
    assert report.taken_back is None
    assert {why for _, why in report.pieces["qk_norm"].refused} == {"its norms are not right before the rotation"}
    assert {why for _, why in report.pieces["rope"].refused} == {"changes query or key after the rotation"}
    check_same_as_own(model, probed, "qwen3")


def scaled_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = rotate_as_is(q, k, cos, sin)
    return q * 1.01, k


rotate_as_is = modeling_qwen3.apply_rotary_pos_emb


def test_a_rotation_that_does_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", scaled_rotation)
    model = built("qwen3")
    probed, report = fused(model)
    assert {why for _, why in report.pieces["qk_norm"].refused} == {"differs"}
    assert report.pieces["rope"].fused == 0
    check_same_as_own(model, probed, "qwen3")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_an_mlp_leaves_to_the_norm_after_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer's: after the last one comes the final norm."""
    left = []

    def make_mlp_for_norm(self: UnquantizedLinear, activation: Activation, down: LinearMethod) -> Product:
        gated, product = self.make_gated_product(activation), down.make_product()

        def mlp(x: Tensor) -> Tensor:
            out = product(gated(x))
            scales = Scales(torch.full((out.numel() // out.shape[-1], 1), 0.5), torch.rand(out.shape[-1]) + 0.5)
            left.append(scales)
            return unfinished(out / scales.rows / scales.columns, scales)

        return mlp

    monkeypatch.setattr(UnquantizedLinear, "make_mlp_for_norm", make_mlp_for_norm)
    model = built(family)
    probed, report = fused(model)
    assert report.taken_back is None
    left.clear()
    check_same_as_own(model, probed, family)
    assert len(left) == 2 * len(model.model.layers)


@pytest.mark.parametrize("is_sandwich", [False, True])
def test_the_last_mlp_of_a_stage_leaves_nothing_if_no_norm_follows(is_sandwich: bool) -> None:
    model = built("gemma2" if is_sandwich else "llama")
    probed, _ = fused(model)
    target = Target(model, probed.layers, MAX_MODEL_LEN, mlps_for_norms={x.mlp: abs for x in model.model.layers})
    decoder = decoder_of(target)
    without_norm = _finished_in_norms(target, replace(decoder, final_norm=None))
    assert [own.mlp is abs for own in _finished_in_norms(target, decoder).parts] == [True, True]
    assert [own.mlp is abs for own in without_norm.parts] == [True, is_sandwich]


def decoder_of(target: Target) -> Decoder:
    """Of a model with two layers, as `fuse_residuals` makes it."""
    layers = list(target.model.model.layers)
    norms = [[module for module in layer.children() if "Norm" in type(module).__name__] for layer in layers]
    kind = RmsNorm(1e-6, 1.0 if len(norms[0]) == 4 else 0.0, len(norms[0]) == 4)
    parts = [
        LayerParts([Norm(module, kind) for module in own], layer.self_attn.forward, layer.mlp.forward, False)
        for layer, own in zip(layers, norms, strict=True)
    ]
    final = target.model.model.norm
    return Decoder(layers, target.layers, parts, final, Norm(final, kind))


def test_nothing_is_left_to_norms_that_do_not_get_the_very_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has the scales: here a hook makes another one of it."""
    monkeypatch.setattr(UnquantizedLinear, "make_mlp_for_norm", lambda *_: wrong_mlp)
    model = built("llama")
    model.model.layers[0].register_forward_hook(lambda module, given, out: out.view(out.shape))
    probed, report = fused(model)
    assert (report.taken_back, report.pieces["residual_norm"].fused) == (None, 2)
    check_same_as_own(model, probed, "llama")


def wrong_mlp(x: Tensor) -> Tensor:
    raise AssertionError("it was put in")


def test_a_piece_that_is_left_out_leaves_no_mlps_for_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(target: Target, tally: Tally) -> None:
        fuse_gate_up(target, tally)
        raise ZeroDivisionError("never seen")

    monkeypatch.setitem(registry.PIECES, "gate_up", raises)
    monkeypatch.setattr(UnquantizedLinear, "make_mlp_for_norm", lambda *_: wrong_mlp)
    model = built("llama")
    probed, report = fused(model)
    assert report.pieces["gate_up"].fused == 0
    check_same_as_own(model, probed, "llama")


# ---- what goes wrong altogether ----


def test_a_piece_that_raises_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def raises(target: Target, tally: Tally) -> None:
        target.patches.set_forward(target.model.model.norm, lambda x: x)
        raise ZeroDivisionError("never seen")

    monkeypatch.setitem(registry.PIECES, "qkv", raises)
    model = built("llama")
    probed, report = fused(model)
    assert report.taken_back is None
    assert str(report).startswith("qkv 0/1, gate_up 2/2")
    assert "piece qkv left out: never seen" in caplog.text
    check_same_as_own(model, probed, "llama")


@pytest.mark.parametrize("fails", [False, True], ids=["wrong", "raises"])
def test_all_is_taken_back_when_the_whole_differs(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(target: Target, tally: Tally) -> None:
        def forward(x: Tensor) -> Tensor:
            if fails:
                raise RuntimeError("no such kernel")
            return x * 2 + 1

        target.patches.set_forward(target.model.model.layers[1].mlp, forward)

    monkeypatch.setitem(registry.PIECES, "gate_up", wrong)
    model = built("qwen3")
    probed, report = fused(model)
    assert report.taken_back is not None
    assert str(report).startswith("none: no such kernel" if fails else "none: logits differ by")
    assert "fast modules are off" in caplog.text
    assert not any("forward" in module.__dict__ for module in model.modules())
    check_same_as_own(model, probed, "qwen3")
