"""One LLM with engines of its own, which all tests here share."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from baton.audit import KvAudit
from baton_llm import LLM
from baton_llm.local.backend import LocalBackend

FLAGS = {"device": "cpu", "cpu_threads": 1, "max_num_seqs": 16, "num_gpu_blocks_override": 512}
PATIENCE_S = 60.0


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(**FLAGS) as llm:
        yield llm


def backend_of(llm) -> LocalBackend:
    backend = llm._host.backend
    assert isinstance(backend, LocalBackend)
    return backend


def wait_whole(llm) -> list[KvAudit]:
    """Until no request is left on either node and every block is back; their books must balance. Each audit waits for
    a turn of the engine, so this does not spin."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        audits = backend_of(llm).audit()
        assert [audit.integrity for audit in audits] == ["ok", "ok"]
        if all(audit.idle and not audit.holders for audit in audits):
            return audits
        assert time.monotonic() < deadline, audits
