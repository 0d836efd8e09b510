"""gpt-oss as it is published, its experts in MXFP4: read as they are, and the answers of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from engine.model import fast
from engine.model.errors import UnsupportedModel
from engine.model.experts import NAMES, expert_modules, expert_shape, own_forward, weights_of
from engine.model.fast.forwards import logits_as_served
from engine.model.fast.target import Target
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.loader import load_model
from engine.model.parallel.group import RankGroup
from engine.model.parallel.part import RankPart
from engine.model.probe import probe
from engine.model.quantization.expert_weights import keep_quantized
from tests.engine import tiny_models
from tests.engine.rank_threads import in_threads
from tests.engine.test_expert_parallel import load_all
from tests.engine.test_parity import MAX_TOKENS, ask, make_engine, run
from tests.engine.test_sharding import check_same, fill_biases
from tools.quantize import write

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in MXFP4, and a plain one with the values that it stands for. Not to be changed."""
    folder = tmp_path_factory.mktemp("mxfp4")
    source = tiny_models.save(tiny_models.CONFIGS["gpt_oss"], folder / "source")
    write(source, folder / "mxfp4", "mxfp4")
    write(source, folder / "plain", "mxfp4", dequantized=True)
    return folder / "mxfp4", folder / "plain"


def changed(folder: Path, into: Path, config: dict[str, Any], files: bool = True) -> Checkpoint:
    """A copy with another `quantization_config`, with or without weights."""
    stated = json.loads((folder / "config.json").read_text())
    stated["quantization_config"] |= config
    (into / "config.json").write_text(json.dumps(stated))
    if files:
        (into / "model.safetensors").symlink_to(folder / "model.safetensors")
    return Checkpoint.open(into)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_have_exactly_the_values_that_codes_stand_for(dtype: str, folders: tuple[Path, Path]) -> None:
    model = load_model(Checkpoint.open(folders[0]), dtype, load_format="safetensors")
    plain, source = (load_file(folder / "model.safetensors") for folder in (folders[1], folders[0].parent / "source"))
    modules = expert_modules(model)
    assert len(modules) == 2
    for module_name, module in modules:
        for name in NAMES:
            weight, stored = getattr(module, name), plain[f"{module_name}.{name}"]
            assert weight.dtype == getattr(torch, dtype)
            assert torch.equal(weight.float(), stored)
            assert 0.05 < (stored - source[f"{module_name}.{name}"]).norm() / stored.norm() < 0.2
        assert {name for name, _ in module.named_parameters()} == {*NAMES, *(f"{name}_bias" for name in NAMES)}


def test_greedy_answers_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    """With the weights dequantized."""
    reference: Any = tiny_models.reference(folders[1])
    torch.manual_seed(0)
    prompts = [tuple(torch.randint(0, tiny_models.VOCAB_SIZE, (length,)).tolist()) for length in (1, 5, 30, 70)]
    engine, _ = make_engine(folders[0], max_num_batched_tokens=32)
    said = run(engine, [ask(str(i), prompt) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        done = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)
        assert said[str(i), 0] == done[0, len(prompt) :].tolist()


def test_modules_that_keep_4_bits_compute_the_same(folders: tuple[Path, Path]) -> None:
    """As on a GPU, also after the probes that fuse them."""
    plain, model = (load_model(Checkpoint.open(folders[1]), load_format="safetensors") for _ in range(2))
    stored = load_file(folders[0] / "model.safetensors")
    for (name, own), (_, module) in zip(expert_modules(plain), expert_modules(model), strict=True):
        parts = [(stored[f"{name}.{of}_blocks"].flatten(2), stored[f"{name}.{of}_scales"]) for of in NAMES]
        assert keep_quantized(module, parts[0], parts[1], torch.bfloat16) is None
        of = weights_of(module)
        assert of is not None
        assert of.four_bits
        assert getattr(module, NAMES[0]).dtype == torch.uint8
        x, ids, weights = torch.randn(5, 64), torch.arange(5)[:, None] % 2, torch.rand(5, 1)
        torch.testing.assert_close(module(x, ids, weights), own_forward(own)(own, x, ids, weights))
    logits = []
    for one in (plain, model):
        probed = probe(one, 128)
        report = fast.apply(one, probed, 128)
        assert report.pieces["experts"].fused == 2
        with torch.inference_mode():
            logits.append(logits_as_served(Target(one, probed.layers, 128), probed.kv))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_experts_of_other_gates_are_not_kept_in_4_bits(folders: tuple[Path, Path]) -> None:
    module: Any = expert_modules(load_model(Checkpoint.open(folders[1])))[0][1]
    module._apply_gate = torch.relu
    empty = torch.zeros(2, 192, 32, dtype=torch.uint8), torch.zeros(2, 192, 2, dtype=torch.uint8)
    assert "its gate is none of" in str(keep_quantized(module, empty, empty, torch.bfloat16))
    assert getattr(module, NAMES[0]).dtype == torch.float32


def test_random_weights(folders: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint = changed(folders[0], tmp_path, {}, files=False)
    one, other = (load_model(checkpoint, load_format="dummy") for _ in range(2))
    for (_, module), (_, same) in zip(expert_modules(one), expert_modules(other), strict=True):
        for name in NAMES:
            weight = getattr(module, name)
            assert torch.equal(weight, getattr(same, name))
            assert 0.005 < weight.std() < 0.0065
            assert not getattr(module, f"{name}_bias").any()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"bits": 8}, "MXFP4 with bits 8: only 4"),
        ({"group_size": 16}, "MXFP4 with group_size 16: only 32"),
        ({"block_size": 64}, "MXFP4 with block_size 64: only 32"),
    ],
)
def test_other_widths_and_blocks_are_refused(
    config: dict[str, int], reason: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(changed(folders[0], tmp_path, config))


def test_files_with_other_blocks_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint = changed(folders[0], tmp_path, {}, files=False)
    stored = load_file(folders[0] / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    stored[name] = stored[name].unflatten(3, (2, 8)).flatten(2, 3)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"{name} is U8 \(2, 64, 6, 8\), in MXFP4 U8 \(2, 64, 3, 16\)"):
        load_model(checkpoint)


def test_columns_that_blocks_do_not_divide_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    stated = json.loads((folders[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"intermediate_size": 80}))
    with pytest.raises(UnsupportedModel, match="blocks of 32 do not divide its 80 columns"):
        load_model(Checkpoint.open(tmp_path), load_format="dummy")


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_have_exactly_the_values_of_their_parts(whole: bool, tmp_path: Path) -> None:
    """Blocks of 32 columns end where a rank's part does."""
    config = {**tiny_models.SHAPE, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    source = tiny_models.save(GptOssConfig(**config, sliding_window=20), tmp_path / "source")
    fill_biases(source)
    write(source, tmp_path / "mxfp4", "mxfp4")
    write(source, tmp_path / "plain", "mxfp4", dequantized=True)
    check_same(tmp_path / "mxfp4", 4, fused=True, whole_experts=whole)
    quantized, plain = (load_all(tmp_path / name, 4, whole_experts=whole) for name in ("mxfp4", "plain"))
    for rank, model in quantized.items():
        theirs = dict(plain[rank].named_parameters())
        assert theirs.keys() == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, theirs[name]), f"{name} of rank {rank}"


def test_fewer_blocks_than_ranks_are_refused(folders: tuple[Path, Path]) -> None:
    def run(group: RankGroup) -> None:
        why = (
            r"96 features of each expert \(--enable-expert-parallel divides whole experts\) in blocks of 32 "
            "cannot be divided among 4 ranks"
        )
        with pytest.raises(UnsupportedModel, match=why):
            load_model(Checkpoint.open(folders[0]), part=RankPart(group))

    with in_threads(4, run) as group:
        run(group)


def test_blocks_are_divided_as_equally_as_can_be(folders: tuple[Path, Path]) -> None:
    check_same(folders[0], 2, fused=True)
    models = load_all(folders[0], 2)
    sizes = [expert_shape(module, "down_proj")[2] for rank in (0, 1) for _, module in expert_modules(models[rank])]
    assert set(sizes) == {32, 64}


def test_ranks_refuse_files_with_other_blocks(folders: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint = changed(folders[0], tmp_path, {}, files=False)
    stored = load_file(folders[0] / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    stored[name] = stored[name][:, :, :1].contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def run(group: RankGroup) -> None:
        with pytest.raises(UnsupportedModel, match=rf"{name} is \(2, 192, 1\), of which . to . of .* cannot be taken"):
            load_model(checkpoint, part=RankPart(group, whole_experts=True))

    with in_threads(2, run) as group:
        run(group)


@pytest.mark.gpu
def test_on_a_gpu_experts_stay_in_4_bits_and_logits_agree(folders: tuple[Path, Path]) -> None:
    logits = []
    for folder in folders:
        model = load_model(Checkpoint.open(folder), "bfloat16", "cuda", "safetensors")
        probed = probe(model, 128)
        report = fast.apply(model, probed, 128)
        assert report.taken_back is None
        assert not any(tally.refused for tally in report.pieces.values()), str(report)
        with torch.inference_mode():
            logits.append(logits_as_served(Target(model, probed.layers, 128), probed.kv))
        if folder == folders[0]:
            for _, module in expert_modules(model):
                of = weights_of(module)
                assert of is not None
                assert of.four_bits
    difference = (logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)
    assert difference.median() < 0.05
