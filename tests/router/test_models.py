"""Nodes of one router agree on what it checks for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from baton import xgrammar_compiler
from baton.errors import NodeUnavailable
from baton.messages import NodeRole
from baton.structured_output import StructuredBackend
from router.models import Models
from router.tokenizer import Tokenizer
from tests.router.house import info

CHECKPOINT = Path(__file__).parents[2] / "engine" / "checkpoints" / "baton-tiny"


def test_nodes_compile_structured_outputs_with_one_backend_that_the_router_has(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer((CHECKPOINT / "tokenizer.json").read_bytes())
    other = dataclasses.replace(info("d", NodeRole.DECODE), structured_outputs_backend=StructuredBackend.XGRAMMAR)
    models = Models()
    monkeypatch.setattr(xgrammar_compiler, "is_installed", lambda: False)
    with pytest.raises(NodeUnavailable, match=r"cannot check: pip install 'baton-serve\[xgrammar\]'"):
        models.join(other, tokenizer)
    monkeypatch.setattr(xgrammar_compiler, "is_installed", lambda: True)
    models.join(other, tokenizer)
    assert models.get(None).structured_outputs_backend is StructuredBackend.XGRAMMAR
    with pytest.raises(NodeUnavailable, match="with guidance, but d with xgrammar"):
        models.join(info("p", NodeRole.PREFILL), tokenizer)
