"""A cluster that serves a published quantized format answers as `transformers` does with the dequantized weights.

CI runs one format; `-m full` runs all of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.checkpoint import EMBEDDED
from tests.e2e import reference_file, references
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster
from tests.summary import COMPARED, NEAR_TIES
from tools.quantize import FORMATS, write

pytestmark = pytest.mark.timeout(300)

TINY = EMBEDDED["baton-tiny"]
IN_CI = "gptq-desc-act"
NUM_PROMPTS = {True: 6, False: 40}
"""By whether it runs in CI."""
MOST_PROMPT_TOKENS = 400
EOS = (4, 2)


def expected(folder: Path, num_prompts: int) -> list[reference_file.Reference]:
    """Greedy answers of transformers, in fp32, to prompts of text and of random tokens."""
    torch.set_num_threads(1)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config = GenerationConfig()
    known = [r for r in reference_file.load().of_kind("text", "ids") if len(r.prompt) <= MOST_PROMPT_TOKENS]
    chosen = known[:: len(known) // num_prompts][:num_prompts]
    return [references.generate(model, list(EOS), r.kind, list(r.prompt), r.max_tokens, r.ignore_eos) for r in chosen]


@pytest.mark.parametrize(
    "form", [IN_CI, *(pytest.param(form, marks=pytest.mark.full) for form in FORMATS if form != IN_CI)]
)
async def test_a_quantized_checkpoint(form: str, tmp_path: Path, record_property: Any) -> None:
    write(TINY, tmp_path / "quantized", form)
    write(TINY, tmp_path / "plain", form, dequantized=True)
    (tmp_path / "logs").mkdir()
    flags = (f"--model={tmp_path / 'quantized'}", "--served-model-name=tiny", "--cpu-threads=1")
    with Cluster(tmp_path / "logs") as cluster:
        prefill, decode = cluster.node("prefill", "prefill", *flags), cluster.node("decode", "decode", *flags)
        router = cluster.router([prefill], [decode], "--first-token=prefill")
        wanted = await asyncio.to_thread(expected, tmp_path / "plain", NUM_PROMPTS[form == IN_CI])
        router.wait_nodes(1, 1)
        async with Client(router) as client:
            answers = await asyncio.gather(
                *(
                    client.complete(list(r.prompt), model="tiny", max_tokens=r.max_tokens, ignore_eos=r.ignore_eos)
                    for r in wanted
                )
            )
    near_ties = 0
    for answer, reference in zip(answers, wanted, strict=True):
        assert answer.status == 200, answer.error
        difference = reference.difference(answer.tokens[0])
        assert difference is None or difference.is_near_tie, str(difference)
        near_ties += difference is not None
    original = {r.prompt: r.output for r in reference_file.load().references}
    assert any(original[r.prompt] != r.output for r in wanted) or "8" in form, "the weights are as exact as before"
    record_property(COMPARED, len(wanted))
    record_property(NEAR_TIES, near_ties)
