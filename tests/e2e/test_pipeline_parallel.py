"""Prefill nodes of several stages: the same answers whatever the stages, and the degrees of both pools."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.e2e import reference_file, references
from tests.e2e.asked_twice import check_twice
from tests.e2e.cluster import Cluster
from tests.engine import tiny_models

pytestmark = pytest.mark.timeout(300)

CI = {(2, 2, 2)}
ALL = [*product((2, 3), (1, 2, 4), (1, 2, 4)), (5, 1, 1), (5, 1, 2)]
LAYOUTS = [pytest.param(*layout, marks=[] if layout in CI else pytest.mark.full) for layout in ALL]
PROMPTS = slice(40, 76, 3)
"""Of 19 to 260 tokens: of several blocks, and in chunks, so that stages have different steps."""
COMMON = ("--num-gpu-blocks-override=400", "--verify-transfers")


@pytest.mark.parametrize(("stages", "prefill", "decode"), LAYOUTS)
async def test_answers_are_those_of_transformers(tmp_path: Path, stages: int, prefill: int, decode: int) -> None:
    """baton-tiny has five layers and two KV heads. Blocks and slots are whole after it."""
    staged = (f"--pipeline-parallel-size={stages}", f"--tensor-parallel-size={prefill}")
    with Cluster(tmp_path) as cluster:
        await check_twice(
            cluster,
            cluster.node("prefill", "prefill", *staged, "--max-num-batched-tokens=64", *COMMON),
            cluster.node("decode", "decode", f"--tensor-parallel-size={decode}", *COMMON),
            PROMPTS,
        )


@pytest.mark.parametrize(
    ("stages", "prefill", "decode"),
    [(3, 1, 2), *(pytest.param(*case, marks=pytest.mark.full) for case in [(2, 2, 1), (2, 1, 1)])],
)
async def test_stages_of_a_model_with_windows(tmp_path: Path, stages: int, prefill: int, decode: int) -> None:
    """Each stage has some layers of some KV groups, and the decode node all: of 40 tokens, or of all."""
    folder = tiny_models.save_windowed(tmp_path / "windowed")
    model, known = tiny_models.reference(folder), reference_file.load().of_kind("ids")[PROMPTS][::2]
    cases = [references.generate(model, [tiny_models.EOS], "ids", list(r.prompt), 12, True) for r in known]
    served = (f"--model={folder}", "--served-model-name=windowed", *COMMON)
    staged = (f"--pipeline-parallel-size={stages}", f"--tensor-parallel-size={prefill}")
    with Cluster(tmp_path) as cluster:
        await check_twice(
            cluster,
            cluster.node("prefill", "prefill", *staged, "--max-num-batched-tokens=64", *served),
            cluster.node("decode", "decode", f"--tensor-parallel-size={decode}", *served),
            cases,
            "windowed",
        )
