"""The benchmark of experts runs, refuses wrong answers, and counts the experts that were chosen. Not how fast."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from baton_kernels.experts import Routing
from baton_kernels.experts import experts as on_cpu
from benchmarks.harness.checks import WrongAnswers
from benchmarks.layers import experts, experts_tune, random_experts
from benchmarks.layers.random_experts import QUICK, SHAPES, Layer

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("weights", ["bfloat16", "fp8", "mxfp4"])
def test_it_runs(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    experts.main(["--quick", f"--weights={weights}"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = line["shapes"]["quick"]
    assert [row["num_tokens"] for row in rows] == [1, 5, 40]
    assert rows[0]["num_hit"] == 2
    assert rows[-1]["num_hit"] == 8
    for row in rows:
        assert row["ratio"] > 1
        assert row["layer_us"] > row["routing_us"] > 0
        assert (row["transformers_us"] is None) == (weights != "bfloat16")


def test_wrong_answers_are_found_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    layer = Layer.random(QUICK, CPU, torch.float32)
    assert layer.check(5) < 1e-5
    with monkeypatch.context() as patched:
        own = on_cpu
        patched.setattr(random_experts, "experts", lambda x, ids, *rest: own(x, ids.flip(0), *rest))
        with pytest.raises(WrongAnswers, match="5 tokens: a result differs"):
            layer.check(5)
        with pytest.raises(SystemExit, match="quick: 5 tokens"):
            experts.main(["--quick"])


def test_what_a_layer_computes_and_reads() -> None:
    layer = Layer.random(replace(QUICK, routing=Routing(2)), CPU, torch.float32)
    assert layer.weights.expert_bytes == 3 * 32 * 32 * 4
    assert layer.flops(3) == 2 * 3 * 2 * 3 * 32 * 32
    assert layer.num_hit(layer.inputs(1, 0)) == 2
    assert not torch.equal(layer.inputs(4, 0), layer.inputs(4, 1))


@pytest.mark.parametrize("text", ["llama", "qwen3-30b-a3b,none"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(SystemExit):
        experts.main([f"--shapes={text}"])


def test_candidates_fit() -> None:
    for rows in (8, 16, 32, 64, 128):
        for matrices in (1, 2):
            found = experts_tune.candidates(rows, matrices)
            assert found
            for tiling in found:
                assert tiling.rows == rows
                num_bytes = tiling.num_stages * tiling.depth * (matrices * tiling.out + rows) * 2
                assert num_bytes <= experts_tune.SM_BYTES
    assert experts_tune.rows_to_try(8, 0.5) == [8, 16]
    assert experts_tune.rows_to_try(8192, 512) == [128]
    assert set(SHAPES) == {"qwen3-30b-a3b", "gpt-oss-20b"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes on a GPU")
def test_tuning_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        experts_tune.main([])
