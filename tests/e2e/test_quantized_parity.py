"""A cluster that serves a published quantized format answers as `transformers` does with the dequantized weights; one
with a KV cache of 8 bits, as transformers does over rounded keys and values.

CI runs one format; `-m full` runs all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.checkpoint import EMBEDDED
from tests.e2e import reference_file, references
from tests.e2e.client import Answer, Client
from tests.e2e.cluster import Cluster
from tests.summary import COMPARED, NEAR_TIES
from tools.quantize import FORMATS, write
from tools.rounded_kv import ROUNDED_KV

pytestmark = pytest.mark.timeout(300)

TINY = EMBEDDED["baton-tiny"]
IN_CI = "gptq-desc-act"
NUM_PROMPTS = {True: 6, False: 40}
"""By whether it runs in CI."""
NUM_MIXED = 30
LEAST_AGREEMENT = 0.7
MOST_PROMPT_TOKENS = 400
KV_NEAR_TIE = 1e-2
"""Of logits: where a key lies between two values of 8 bits, the last bit of fp32 decides."""
EOS = (4, 2)


def expected(folder: Path, num_prompts: int, attention: str = "sdpa") -> list[reference_file.Reference]:
    """Greedy answers of transformers, in fp32, to prompts of text and of random tokens."""
    torch.set_num_threads(1)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
    ).eval()
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
    wanted = await asyncio.to_thread(expected, tmp_path / "plain", NUM_PROMPTS[form == IN_CI])
    answers = await ask(tmp_path, wanted, f"--model={tmp_path / 'quantized'}")
    compare(answers, wanted, reference_file.NEAR_TIE, record_property)
    assert differs(wanted) or "8" in form, "the weights are as exact as before"


async def test_a_kv_cache_of_8_bits(tmp_path: Path, record_property: Any) -> None:
    wanted = await asyncio.to_thread(expected, TINY, NUM_PROMPTS[True], ROUNDED_KV)
    answers = await ask(tmp_path, wanted, f"--model={TINY}", dtypes={"prefill": "fp8", "decode": "fp8"})
    compare(answers, wanted, KV_NEAR_TIE, record_property)
    assert differs(wanted), "the KV is as exact as before"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("fp8", "auto"), ("auto", "fp8"), pytest.param("fp8", "fp8", marks=pytest.mark.full)],
)
async def test_nodes_with_different_kv_caches(prefill: str, decode: str, tmp_path: Path) -> None:
    """Of each answer, the tokens up to the first other one count as those in fp32."""
    known = reference_file.load().of_kind("text")
    wanted = [r for r in known if len(r.prompt) <= MOST_PROMPT_TOKENS][:NUM_MIXED]
    dtypes = {"prefill": prefill, "decode": decode}
    answers = await ask(tmp_path, wanted, f"--model={TINY}", dtypes=dtypes)
    same, total = 0, 0
    for answer, reference in zip(answers, wanted, strict=True):
        assert answer.status == 200, answer.error
        difference = reference.difference(answer.tokens[0])
        total += len(reference.output)
        same += len(reference.output) if difference is None else difference.index
    print(f"KV cache {prefill} -> {decode}: {same / total:.1%} of {total} greedy tokens as in fp32")
    assert same / total > LEAST_AGREEMENT


async def ask(
    folder: Path, wanted: list[reference_file.Reference], *flags: str, dtypes: Mapping[str, str] = {}
) -> list[Answer]:
    (folder / "logs").mkdir()
    flags = *flags, "--served-model-name=tiny", "--cpu-threads=1"
    with Cluster(folder / "logs") as cluster:
        prefill, decode = (
            cluster.node(role, role, *flags, f"--kv-cache-dtype={dtypes.get(role, 'auto')}")
            for role in ("prefill", "decode")
        )
        router = cluster.router([prefill], [decode], "--first-token=prefill")
        router.wait_nodes(1, 1)
        async with Client(router) as client:
            return await asyncio.gather(
                *(
                    client.complete(list(r.prompt), model="tiny", max_tokens=r.max_tokens, ignore_eos=r.ignore_eos)
                    for r in wanted
                )
            )


def compare(answers: list[Answer], wanted: list[reference_file.Reference], near: float, record_property: Any) -> None:
    near_ties = 0
    for answer, reference in zip(answers, wanted, strict=True):
        assert answer.status == 200, answer.error
        difference = reference.difference(answer.tokens[0])
        assert difference is None or difference.margin <= near, str(difference)
        near_ties += difference is not None
    record_property(COMPARED, len(wanted))
    record_property(NEAR_TIES, near_ties)


def differs(wanted: list[reference_file.Reference]) -> bool:
    """Whether some answer is not that of the model as it is."""
    original = {r.prompt: r.output for r in reference_file.load().references}
    return any(original[r.prompt] != r.output for r in wanted)
