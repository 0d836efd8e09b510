"""The benchmarks of the engine run, refuse wrong answers, and count what they say. Not how fast anything is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from baton.kv_groups import group_layers
from baton.layout import KvLayout, KvSlice, LayerKv
from baton.messages import TokenLogprobs
from baton.settings import parse
from benchmarks.engine import decode, prefill, sampling, structured
from benchmarks.engine.all import SECTIONS, AllBenchSettings
from benchmarks.engine.bench import Bench, open_bench
from benchmarks.engine.check import LIMITS, Answer, check, compare, judge, reference_of
from benchmarks.engine.performance_page import NOTHING, PARTS, plots, write_page
from benchmarks.engine.report import main
from benchmarks.engine.shape import kv_bytes, shape_of
from benchmarks.engine.trace import summarize
from benchmarks.harness.ceilings import GRAIN_BYTES, measure
from benchmarks.harness.checks import WrongAnswers
from engine.model.experts import expert_modules
from engine.model.load.checkpoint import Checkpoint

TINY = LlamaConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.2,  # logits far apart
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)
MIXTURE = Qwen3MoeConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    architectures=["Qwen3MoeForCausalLM"],
)
SMALL = ["--quick", "--device=cpu", "--cpu-threads=1", "--max-num-seqs=4", "--num-gpu-blocks-override=64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration, without weights."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("shape")
    TINY.save_pretrained(path)
    return path


def test_all_sections_of_a_trained_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output, trace = tmp_path / "run.json", tmp_path / "trace.json"
    argv = ["--model=baton-tiny", "--load-format=auto", "--max-model-len=512", f"--output={output}", f"--trace={trace}"]
    main(AllBenchSettings, SECTIONS, [*SMALL, *argv])
    printed = capsys.readouterr().out
    line = json.loads(printed.splitlines()[-1])
    assert line == json.loads(output.read_text())
    assert line["checked"]["agreement"] == 1
    assert line["command"].startswith("python -m benchmarks.engine.all --model baton-tiny")
    assert "--quick --output run.json --trace trace.json" in line["command"]
    for cell in line["decode"]["cells"]:
        assert cell["ratio"] == pytest.approx(cell["mean_ms"] / cell["floor_ms"], rel=1e-2)
        assert sum(cell["host_ms"].values()) == pytest.approx(cell["mean_ms"], rel=1e-2)
        assert cell["vllm_ms"] is None
    assert [told["num_tokens"] for told in line["prefill"]["alone"]] == [16, 100]
    assert line["throughput"]["output_tokens_per_s"] > 0
    assert line["prefill_even"] is None
    assert "host waits" in printed
    assert line["decode"]["trace"] is None
    assert "traceEvents" in json.loads(trace.read_text())
    parts = PARTS.keys() - {"compared", "trace", "prefill_even"}  # which a CPU, or a trained model, has not
    page = write_page("".join(f"<!-- measured: {part} -->\n<!-- end -->\n" for part in parts), {"tiny": line})
    assert NOTHING not in page
    assert plots({"tiny": line})


def test_constrained_sequences_are_measured(folder: Path) -> None:
    argv = [*SMALL, f"--model={folder}", "--constrained=1,4", "--max-num-seqs=8"]
    bench, _ = open_bench(parse(structured.StructuredBenchSettings, argv))
    told = structured.measure(bench)
    assert [row["constrained"] for row in told["rows"]] == [0, 1, 4]
    assert [row["ms/token, free"] is None for row in told["rows"]] == [False] * 3
    assert [row["ms/token, constrained"] is None for row in told["rows"]] == [True, False, False]
    assert not bench.engine.has_work


def test_sampling_parameters_are_measured(folder: Path) -> None:
    bench, _ = open_bench(parse(sampling.SamplingBenchSettings, [*SMALL, f"--model={folder}"]))
    told = sampling.measure(bench)
    assert [row["sampling"] for row in told["rows"]] == list(sampling.samplings(1000, 10))
    assert all(row["ms"] > 0 for row in told["rows"])
    assert not bench.engine.has_work


def test_random_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections: dict[str, Any] = {"prefill": prefill.measure, "prefill_even": prefill.measure_even}
    main(prefill.PrefillBenchSettings, sections, [*SMALL, f"--model={folder}"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["prefill"].keys() == line["prefill_even"].keys()
    assert line["load_format"] == "dummy"
    assert line["checked"]["agreement"] >= 0.98
    assert "decode" not in line


def test_the_experts_that_steps_read_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    MIXTURE.save_pretrained(tmp_path)
    sections: dict[str, Any] = {"decode": decode.measure, "decode_even": decode.measure_even}
    argv = [*SMALL, f"--model={tmp_path}", "--sampled-cells="]
    bench, _ = open_bench(parse(decode.DecodeBenchSettings, argv))
    told = {name: section(bench) for name, section in sections.items()}
    printed = capsys.readouterr().out
    assert printed.count("x their floor") == 2
    for section in told.values():
        alone, three = section["cells"][:2]  # greedy
        assert alone["experts"] == 2  # as many as a token takes
        assert 2 < three["experts"] <= 6
        for cell in (alone, three):
            found = cell["mean_ms"] / cell["experts_floor_ms"]
            assert cell["experts_ratio"] == pytest.approx(found, rel=0.1), "which are rounded"
        assert alone["experts_floor_ms"] == alone["floor_ms"]
    modules = [module for _, module in expert_modules(bench.built.runner.model)]
    assert [len(module._forward_pre_hooks) for module in modules] == [1, 1], "only the node's own counts stay"
    assert not bench.engine.has_work


def test_other_weights_are_found_out(folder: Path) -> None:
    bench, _ = open_bench(parse(prefill.PrefillBenchSettings, [*SMALL, f"--model={folder}"]))
    check(bench, reference_of(bench))
    torch.manual_seed(1)
    with pytest.raises(WrongAnswers, match="greedy tokens are the reference's"):
        check(bench, LlamaForCausalLM(TINY).eval())


def test_nothing_is_told_when_answers_are_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def section(_: Bench) -> dict[str, Any]:
        raise WrongAnswers("all of them")

    with pytest.raises(SystemExit, match="1"):
        main(prefill.PrefillBenchSettings, {"prefill": section}, [*SMALL, f"--model={folder}"])
    told = capsys.readouterr()
    assert told.err.endswith("benchmarks.engine.prefill: all of them\n")
    assert "{" not in told.out


def test_what_was_measured_before_a_failure_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Bench) -> dict[str, Any]:
        raise RuntimeError("no more")

    with pytest.raises(SystemExit, match="1"):
        main(
            prefill.PrefillBenchSettings,
            {"prefill": lambda _: {"fast": 1}, "broken": broken},
            [*SMALL, f"--model={folder}"],
        )
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["prefill"], line["failed"]) == ({"fast": 1}, "RuntimeError('no more')")


class _Uniform(nn.Module):
    """Whose logits grow with the token id."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int, **_: object) -> Any:
        logits = torch.arange(50.0).expand(1, input_ids.shape[1], 50)
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


@pytest.mark.parametrize(
    ("token", "told", "text"),
    [(49, 0.0, None), (49, 1.0, "a logprob is"), (48, -1.0, "only 0%"), (10, -39.0, "only 0%")],
)
def test_comparison(token: int, told: float, text: str | None) -> None:
    best = torch.arange(50.0).log_softmax(0)[49].item()
    answer = Answer((1, 2, 3), [token] * 2, [TokenLogprobs(best + told, ((49, best),))] * 2)
    found = compare([answer], _Uniform(), 1)
    assert found.max_shortfall == pytest.approx((49 - token) / torch.arange(50.0).std().item(), abs=1e-6)
    if text is None:
        judge(found, LIMITS[torch.float32])
    else:
        with pytest.raises(WrongAnswers, match=text):
            judge(found, LIMITS[torch.float32])


def test_adopted_batches_have_the_context_they_are_said_to_have(folder: Path) -> None:
    settings = parse(decode.DecodeBenchSettings, [*SMALL, f"--model={folder}"])
    bench, _ = open_bench(settings)
    decode.fill_pool(bench)
    assert bench.built.pools[0].view(bench.dtype).std() == pytest.approx(1, rel=0.05)
    running = decode.adopt(bench, (3, 40), 10, decode.SAMPLINGS["greedy"])
    assert [seq.num_computed_tokens for seq in running] == [40, 41, 42]
    bench.engine.check_integrity()
    decode.end(bench.engine, running)
    bench.engine.check_integrity()
    assert bench.engine.blocks.counts_by_state()[type(bench.engine.blocks.state(1)).OWNED] == 0


@pytest.mark.parametrize("text", ["8", "x1", "1x0", "axb"])
def test_cells_that_are_none(text: str) -> None:
    with pytest.raises(SystemExit):
        parse(decode.DecodeBenchSettings, [f"--cells={text}"])


def test_what_a_step_reads_and_a_prompt_computes(folder: Path) -> None:
    shape = shape_of(Checkpoint.open(folder), torch.float32)
    layer = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48 + 2 * 32
    assert shape.read_params == 2 * layer + 32 + 300 * 32
    assert shape.step_bytes(5, 100) == shape.read_params * 4 + 5 * 100
    assert shape.prompt_flops(3) == 2 * 3 * (2 * layer + 32) + 2 * 300 * 32 + 4 * 2 * 4 * 8 * (1 + 2 + 3)
    assert shape.vllm is None


def test_of_experts_only_those_that_are_chosen_count() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, of which a token takes 3.3."""
    models = Path(__file__).parents[3] / "benchmarks" / "models"
    shape = shape_of(Checkpoint.open(models / "qwen3-30b-a3b"), torch.bfloat16)
    table = 151936 * 2048
    expert = 3 * 2048 * 768
    assert shape.experts is not None
    assert shape.experts.num_params == 48 * 128 * expert
    assert shape.read_params + shape.experts.num_params + table == pytest.approx(30.5e9, rel=2e-3)
    assert shape.token_params + 2 * table == pytest.approx(3.35e9, rel=5e-3)
    assert shape.step_bytes(1, 0) == 2 * (shape.read_params + 48 * 8 * expert)
    of_two = 48 * 128 * expert * (1 - (1 - 8 / 128) ** 2)
    assert shape.step_bytes(2, 0) == pytest.approx(2 * (shape.read_params + of_two))
    oss = shape_of(Checkpoint.open(models / "gpt-oss-20b"), torch.bfloat16)
    assert oss.token_params + 2 * 201088 * 2880 == pytest.approx(4.2e9, rel=2e-2)  # its card counts one table: 3.6


def test_layers_with_a_window_read_and_compute_no_more_than_it() -> None:
    """gpt-oss-20b: half of its layers look back 128 tokens. A block has the layers of one half only."""
    layers = tuple(LayerKv(8, 64, 64, "bfloat16", 128 if index % 2 == 0 else None) for index in range(24))
    layout = KvLayout(layers, 16, "", groups=group_layers(layers))
    token = 2 * 8 * 64 * 2
    assert len(layout.groups) == 2
    assert kv_bytes(layout, 100) == 24 * 100 * token
    assert kv_bytes(layout, 1000) == (12 * 1000 + 12 * 128) * token
    halves = tuple(KvSlice(0, 24, start, start + 4) for start in (0, 4))
    assert kv_bytes(dataclasses.replace(layout, ranks=halves), 1000) == kv_bytes(layout, 1000) / 2
    oss = Checkpoint.open(Path(__file__).parents[3] / "benchmarks" / "models" / "gpt-oss-20b")
    windows = [layer.sliding_window for layer in layers]
    full, own = (shape_of(oss, torch.bfloat16, windows=of) for of in ((), windows))
    out_of_reach = sum(max(0, token - 128) for token in range(1, 1001))
    assert full.prompt_flops(1000) - own.prompt_flops(1000) == 12 * 4 * 64 * 64 * out_of_reach


def test_vllm_is_compared_with_its_own_shape() -> None:
    models = Path(__file__).parents[3] / "benchmarks" / "models"
    llama = shape_of(Checkpoint.open(models / "llama-3.1-8b"), torch.bfloat16)
    assert llama.read_params * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert llama.vllm is not None
    defaults = AllBenchSettings()
    cells = decode.parse_cells(defaults.cells)
    assert set(cells) == set(llama.vllm.decode_ms)
    assert prefill.parse_lengths(defaults.lengths) == list(llama.vllm.prefill_ms)
    assert shape_of(Checkpoint.open(models / "llama-3.1-8b"), torch.float16).vllm is None
    assert shape_of(Checkpoint.open(models / "qwen3-8b"), torch.bfloat16).vllm is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ceilings(device: str) -> None:
    found = measure(torch.device(device), 16 * GRAIN_BYTES, 16)
    assert min(found.read_bytes_per_s, found.copy_bytes_per_s, found.matmul_flops_per_s) > 0


def test_pauses_in_a_trace(tmp_path: Path) -> None:
    spans = [(0, 10), (2, 5), (11, 4), (25, 5)]  # overlapping; a pause of 1 us; one of 10
    events = [{"cat": "kernel", "ts": 1000 + start, "dur": duration} for start, duration in spans]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [*events, {"cat": "cpu_op", "ts": 0, "dur": 5000}, {"ph": "M"}]}))
    summary = summarize(file, 2)
    assert summary is not None
    assert (summary.span_us, summary.busy_us, summary.idle_us) == (15, 9.5, 5.5)
    assert (summary.gaps, summary.gaps_us, summary.largest_gap_us) == (0.5, 5, 10)
    assert summary.num_kernels == 2
    file.write_text(json.dumps({"traceEvents": []}))
    assert summarize(file, 2) is None
