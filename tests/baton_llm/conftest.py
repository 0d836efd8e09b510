"""One LLM with engines of its own, which all tests here share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.audit import KvAudit
from baton_llm import LLM
from baton_llm.local.backend import LocalBackend

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "cpu_threads": 1,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 512,
    "max_logprobs": -1,
}
PATIENCE_S = 60.0


PLUGIN = Path(__file__).parents[1] / "logits_processors_plugin"


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """With a package that offers logits processors."""
    sys.path.append(str(PLUGIN))
    try:
        with LLM(**FLAGS) as llm:
            yield llm
    finally:
        sys.path.remove(str(PLUGIN))


def backend_of(llm) -> LocalBackend:
    backend = llm._host.backend
    assert isinstance(backend, LocalBackend)
    return backend


def audit(llm) -> list[KvAudit]:
    """Of the prefill node and the decode node, each between two turns of its engine."""
    nodes = (backend_of(llm).prefill, backend_of(llm).decode)
    return [node.call(partial(node.role.audit, time.monotonic())).result(PATIENCE_S) for node in nodes]


def wait_whole(llm) -> list[KvAudit]:
    """Until no request is left on either node and every block is back; their accounts must agree. Each audit waits for
    a turn of the engine, so this does not spin."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        audits = audit(llm)
        assert [one.integrity for one in audits] == ["ok", "ok"]
        if all(one.idle and not one.holders for one in audits):
            return audits
        assert time.monotonic() < deadline, audits
