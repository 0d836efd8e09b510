"""Weights straight from the files are those that transformers loads, to the bit; and random ones."""

from __future__ import annotations

import logging
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

from engine.model.errors import UnsupportedModel
from engine.model.load import loader, parallel_read, placing
from engine.model.load.checkpoint import Checkpoint
from engine.model.load.skeleton import build_skeleton
from engine.model.parallel.cut import Cut
from tests.engine import tiny_models

torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
LLAMA = tiny_models.CONFIGS["llama"]
ROPES: dict[str, dict[str, Any]] = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "linear": {"factor": 4.0},
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint in fp32 of each family."""
    root = tmp_path_factory.mktemp("families")
    return {name: tiny_models.save(config, root / name) for name, config in tiny_models.CONFIGS.items()}


@pytest.fixture
def llama(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(folders["llama"], tmp_path / "llama"))


def by_transformers(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(device)
    return model.eval()


def directly(folder: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """On a CPU `load_model` would make it float32."""
    return loader._load(Checkpoint.open(folder), dtype, torch.device(device), "safetensors")


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace, add or remove (None) tensors of the checkpoint; `__` stands for a dot."""
    file = folder / "model.safetensors"
    changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file, metadata={"format": "pt"})


def assert_same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """In names, dtypes, ties and bits: all that a forward reads."""
    ours, theirs = dict(_tensors(model)), dict(_tensors(other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.device == theirs[name].device, name
        assert torch.equal(tensor, theirs[name]), name
    assert model.dtype == other.dtype
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def _tensors(model: PreTrainedModel) -> Any:
    yield from model.named_parameters()  # a tied one has one name
    yield from model.named_buffers()


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", tiny_models.CONFIGS)
def test_each_family(folders: dict[str, Path], family: str, dtype: torch.dtype, device: str) -> None:
    assert_same(directly(folders[family], dtype, device), by_transformers(folders[family], dtype, device))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_no_file_holds(tmp_path: Path, rope: str, device: str) -> None:
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]}
    folder = tiny_models.save(LlamaConfig(**tiny_models.SHAPE, rope_parameters=parameters), tmp_path)
    assert_same(directly(folder, torch.bfloat16, device), by_transformers(folder, torch.bfloat16, device))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_in_many_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str
) -> None:
    tiny_models.save(LLAMA, tmp_path)
    by_transformers(tmp_path, torch.float32).save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    monkeypatch.setattr(parallel_read, "SPAN_BYTES", 200)
    assert_same(directly(tmp_path / "sharded", dtype, device), by_transformers(tmp_path, dtype, device))


def test_a_file_that_the_index_does_not_name_is_not_read(llama: Path) -> None:
    shutil.copy(llama / "model.safetensors", llama / "consolidated.safetensors")
    change(llama, model__norm__weight=torch.full((64,), 3.0))
    assert float(directly(llama, torch.float32).get_parameter("model.norm.weight")[0]) == 3.0


def test_no_file_stays_open(llama: Path) -> None:
    """A file was opened for each tensor in it, and closed once."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    directly(llama, torch.bfloat16)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_files_of_mixed_dtypes(llama: Path) -> None:
    change(llama, model__norm__weight=torch.rand(64).half(), lm_head__weight=torch.rand(160, 64, dtype=torch.float64))
    assert_same(directly(llama, torch.bfloat16), by_transformers(llama, torch.bfloat16))


# ---- tied ----


def tied(folder: Path) -> Path:
    return tiny_models.save(LlamaConfig(**tiny_models.SHAPE, tie_word_embeddings=True), folder)


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    model = directly(tied(tmp_path), torch.float32)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert_same(model, by_transformers(tmp_path, torch.float32))


def test_tied_weights_may_be_stored_under_the_other_name_or_twice(tmp_path: Path) -> None:
    embedding = load_file(tied(tmp_path) / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone())
    assert_same(directly(tmp_path, torch.float32), by_transformers(tmp_path, torch.float32))
    change(tmp_path, model__embed_tokens__weight=None)
    assert_same(directly(tmp_path, torch.float32), by_transformers(tmp_path, torch.float32))


# ---- through transformers, or not at all ----


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__layers__0__self_attn__freq": torch.rand(8)}, "the model has no model.layers.0"),
        ({"model__norm__gamma": torch.ones(64)}, "the model has no model.norm.gamma"),
    ],
)
def test_what_is_not_the_models_own_goes_through_transformers(
    llama: Path, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(llama, **changes)
    with pytest.raises(UnsupportedModel, match=f"--load-format safetensors: {reason}"):
        loader.load_model(Checkpoint.open(llama), load_format="safetensors")
    with caplog.at_level(logging.INFO):
        model = loader.load_model(Checkpoint.open(llama))
    assert f"weights go through transformers: {reason}" in caplog.text
    assert_same(model, by_transformers(llama, torch.float32))


def test_tied_weights_that_differ_are_two(tmp_path: Path) -> None:
    change(tied(tmp_path), lm_head__weight=torch.rand(160, 64))
    with pytest.raises(UnsupportedModel, match="are tied, but differ"):
        loader.load_model(Checkpoint.open(tmp_path), load_format="safetensors")
    model = loader.load_model(Checkpoint.open(tmp_path))
    assert not torch.equal(model.get_parameter("lm_head.weight"), model.get_parameter("model.embed_tokens.weight"))


@pytest.mark.parametrize("family", tiny_models.MIXTURES)
def test_experts_that_are_stored_one_by_one(family: str, tmp_path: Path) -> None:
    """As transformers' conversions of the model's class put them together, and rename the rest."""
    folder = tiny_models.save(tiny_models.MIXTURES[family], tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(directly(folder, dtype), by_transformers(folder, dtype))


def test_what_stays_in_fp32(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of classes that say so, as GLM-4.5's does of a bias that decides between experts."""
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    model = directly(folders["llama"], torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if "norm" in name}
    assert dtypes["model.layers.1.input_layernorm.weight"] == torch.float32
    assert dtypes["model.norm.weight"] == torch.bfloat16
    assert_same(model, by_transformers(folders["llama"], torch.bfloat16))


EXPERT = "model.layers.1.mlp.experts.3."


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"up_proj.weight": None}, "the checkpoint has not all experts of model.layers.1.mlp.experts.gate_up_proj"),
        ({"gate_proj.weight": torch.rand(64, 32)}, r".*3.gate_proj.weight is \(64, 32\), not \(32, 64\)"),
        (
            {"down_proj.weight": torch.rand(64, 32).to(torch.float8_e4m3fn)},
            "model.layers.1.mlp.experts.3.down_proj.weight is F8_E4M3, of a quantized weight",
        ),
        ({"gate_proj.weight_scale": torch.rand(1)}, "model.layers.1.mlp.experts.3.gate_proj.weight_scale is F32"),
    ],
)
def test_experts_that_are_stored_otherwise(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.MIXTURES["qwen3_moe"], tmp_path)
    change(folder, **{EXPERT + name: tensor for name, tensor in changes.items()})
    with pytest.raises(UnsupportedModel, match=reason):
        loader.load_model(Checkpoint.open(folder), load_format="safetensors")


@pytest.mark.parametrize("table", ["inv_freq", "cos_cached", "sin_cached"])
def test_tables_that_are_computed_are_left_out(table: str, tmp_path: Path) -> None:
    """Files of Llama 2 have them."""
    tied(tmp_path)
    change(tmp_path, **{f"model__layers__0__self_attn__rotary_emb__{table}": torch.rand(8)})
    assert_same(directly(tmp_path, torch.float32), by_transformers(tmp_path, torch.float32))


def test_an_expert_too_many(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.MIXTURES["qwen3_moe"], tmp_path)
    change(folder, **{EXPERT.replace("3", "8") + "down_proj.weight": torch.rand(64, 32)})
    with pytest.raises(UnsupportedModel, match=r"converts model\.layers\.1\.mlp\.experts\.8\.down_proj"):
        loader.load_model(Checkpoint.open(folder), load_format="safetensors")


def test_conversions_that_compute_are_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a transposition of each expert, as some classes have."""
    converter = WeightConverter(
        ["mlp.experts.*.down_proj.weight"], ["mlp.experts.down_proj"], [Transpose(0, 1), MergeModulelist(0)]
    )
    monkeypatch.setattr(placing, "get_model_conversion_mapping", lambda _: [converter])
    folder = tiny_models.save(tiny_models.MIXTURES["qwen3_moe"], tmp_path)
    with pytest.raises(UnsupportedModel, match=r"transformers converts model.*down_proj"):
        loader.load_model(Checkpoint.open(folder), load_format="safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """One by one where they are long; else several at a time, and each value once; into some columns of a tensor."""
    numbers = torch.arange(5 * 7 * 6, dtype=torch.float32).view(5, 7, 6)
    (tmp_path / "file").write_bytes(b"head" + numbers.numpy().tobytes())
    monkeypatch.setattr(parallel_read, "SPAN_BYTES", 100)
    read: list[int] = []
    for shortest in (8, 13):
        monkeypatch.setattr(parallel_read, "MIN_RUN_BYTES", shortest)
        target = torch.full((5, 7, 4), float("nan"), dtype=dtype)
        (runs,) = Cut(2, ((3, 5),), (5, 7, 6)).runs()
        rows = target.view(35, 4)[:, 1:3]
        spans = list(parallel_read.run_spans(tmp_path / "file", 4, torch.float32, rows, runs))
        assert len(spans) == {8: 35, 13: 9}[shortest]
        parallel_read.read_spans(spans, read.append)
        assert torch.equal(target[:, :, 1:3], numbers[:, :, 3:5].to(dtype))
        assert bool(target[:, :, [0, 3]].isnan().all())
    assert sum(read) == 2 * 5 * 7 * 2 * 4


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_weights_that_are_missing_are_not_made_up(llama: Path, load_format: loader.LoadFormat) -> None:
    change(llama, model__norm__weight=None)
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight"):
        loader.load_model(Checkpoint.open(llama), load_format=load_format)


def test_a_file_that_is_cut_off_is_named(llama: Path) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is cut off: it lacks the data of"):
        loader.load_model(Checkpoint.open(llama))
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(UnsupportedModel, match=r"cannot be read: the header is longer than the file"):
        loader.load_model(Checkpoint.open(llama))


# ---- dummies ----


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_dummies_need_only_a_config_and_are_the_same_every_time(
    folders: dict[str, Path], tmp_path: Path, device: str
) -> None:
    shutil.copy(folders["llama"] / "config.json", tmp_path)
    before = torch.get_rng_state()
    first, second = (loader.load_model(Checkpoint.open(tmp_path), device=device, load_format="dummy") for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert_same(first, second)
    real = by_transformers(folders["llama"], torch.float32, device)
    assert torch.equal(first.get_buffer("model.rotary_emb.inv_freq"), real.get_buffer("model.rotary_emb.inv_freq"))
    for name, parameter in first.named_parameters():
        if parameter.dim() > 1:
            assert parameter.float().std().item() == pytest.approx(LLAMA.initializer_range, rel=0.1), name
        else:
            assert bool((parameter == 1).all()), name


def test_dummy_norms_are_what_leaves_a_value_alone(folders: dict[str, Path]) -> None:
    """Gemma adds one to its weights."""
    model = loader.load_model(Checkpoint.open(folders["gemma2"]), load_format="dummy")
    assert not model.get_parameter("model.norm.weight").any()


def test_dummies_have_a_fingerprint_of_their_own(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(folders["llama"] / "config.json", tmp_path)
    llama, qwen3 = (Checkpoint.open(folders[name]) for name in ("llama", "qwen3"))
    dummy = llama.fingerprint(dummy=True)
    assert dummy == Checkpoint.open(tmp_path).fingerprint(dummy=True)
    assert dummy not in {llama.fingerprint(), qwen3.fingerprint(dummy=True)}


@pytest.mark.parametrize(("name", "num_params"), [("llama-3.1-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360)])
def test_shapes_for_benchmarks_take_no_memory_before_they_are_filled(name: str, num_params: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = AutoConfig.from_pretrained(ROOT / "benchmarks" / "models" / name)
    model = build_skeleton(config, torch.bfloat16, "eager")
    assert sum(parameter.numel() for parameter in model.parameters()) == num_params
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.gpu
def test_no_second_copy_on_the_device(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    folder = tiny_models.save(LlamaConfig(**{**tiny_models.SHAPE, **sizes}), tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = loader.load_model(Checkpoint.open(folder), "float32", "cuda", "safetensors")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.02 * weights
