"""An LLM on a GPU: two engines on one device, over `memory`."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from baton_llm import LLM, SamplingParams
from tests.baton_llm.conftest import wait_whole
from tests.e2e import reference_file

pytestmark = pytest.mark.gpu


def test_tokens_are_those_of_transformers_and_all_memory_comes_back() -> None:
    references = [r for r in reference_file.load().of_kind("ids", "text", "shared") if len(r.prompt) < 1500][::4]
    params = [SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=r.ignore_eos) for r in references]
    before = set(threading.enumerate())
    with LLM(device="cuda", dtype="float32", gpu_memory_utilization=0.4) as llm:
        outputs = llm.generate([list(r.prompt) for r in references], params, use_tqdm=False)
        wait_whole(llm)
    differences = [r.difference(o.outputs[0].token_ids) for r, o in zip(references, outputs, strict=True)]
    assert [str(d) for d in differences if d and d.margin > 1e-2] == []
    new = set(threading.enumerate()) - before
    del llm
    gc.collect()
    for thread in new:
        thread.join(20)
    assert not [thread.name for thread in new if thread.is_alive()]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 2**28
