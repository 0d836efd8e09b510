"""A model with sliding windows on a prefill and a decode node: less is kept and sent, and the answers are the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig

from baton_llm import LLM, SamplingParams
from engine.checkpoint import EMBEDDED
from tests.baton_llm.conftest import backend_of, wait_whole
from tests.engine import tiny_models

WINDOW = 40
PROMPTS = [[20 + index % 7 + number for index in range(length)] for number, length in enumerate((39, 40, 41, 300, 300))]
FLAGS: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that are random, and baton-tiny's tokenizer."""
    config = GptOssConfig(
        **tiny_models.SHAPE | {"vocab_size": 2048, "num_hidden_layers": 4, "eos_token_id": 2047},
        sliding_window=WINDOW,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    folder = tiny_models.save(config, tmp_path_factory.mktemp("windows"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED["baton-tiny"] / name, folder)
    return folder


def answers(folder: Path, **flags: Any) -> tuple[list[tuple[int, ...]], tuple[int | None, ...], int]:
    """Of all prompts, twice; the windows of the decode node's groups, and the bytes of a block."""
    sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    with LLM(model=str(folder), **FLAGS, **flags) as llm:
        said = [tuple(output.outputs[0].token_ids) for _ in range(2) for output in llm.generate(PROMPTS, sampling)]
        decode: Any = backend_of(llm).decode.role
        assert wait_whole(llm)
        assert decode.engine.blocks.num_claimed == 0
        return said, decode.engine.config.windows, decode.receiver.layout.block_bytes


def test_the_answers_are_those_of_nodes_that_keep_all(folder: Path) -> None:
    (said, windows, block_bytes), (plain, _, whole_bytes) = (
        answers(folder, disable_hybrid_kv_cache_manager=keeps_all) for keeps_all in (False, True)
    )
    assert windows == (None, WINDOW)
    assert said == plain
    assert said[:5] == said[5:]
    assert 2 * block_bytes == whole_bytes
