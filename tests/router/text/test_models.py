"""The models of a router: by name, in versions, for as long as nodes of them are there or may come back."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from random import Random

import pytest

from baton.errors import InvalidRequest, NodeUnavailable
from baton.node_info import NodeInfo, NodeRole
from baton.structured_output import xgrammar_compiler
from baton.structured_output.constraint import StructuredBackend
from router.text.models import Models, ServedModel, UnknownModel
from router.text.tokenizer import Tokenizer
from router.versions import version_of
from tests.router.rig import info

CHECKPOINT = Path(__file__).parents[3] / "engine" / "checkpoints" / "baton-tiny"


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
    assert version_of(other) != version_of(info("d", NodeRole.DECODE)), "they never share a request"


def drawn(models: Models, name: str | None = None) -> list[ServedModel]:
    return [models.get(name) for _ in range(64)]


TOKENIZER = Tokenizer((CHECKPOINT / "tokenizer.json").read_bytes())
DIGEST = TOKENIZER.digest


def node(name: str, model: str = "m", fingerprint: str = "f", max_model_len: int = 64) -> NodeInfo:
    plain = info(name, NodeRole.DECODE)
    layout = dataclasses.replace(plain.layout, fingerprint=fingerprint)
    return dataclasses.replace(
        plain, served_model_name=model, layout=layout, max_model_len=max_model_len, tokenizer_digest=DIGEST
    )


def test_a_model_is_found_by_name_and_an_unknown_one_is_a_404_that_lists_them() -> None:
    models = Models()
    models.join(node("a", "one"), TOKENIZER)
    models.join(node("b", "two"), TOKENIZER)
    assert [model.name for model in models.served()] == ["one", "two"]
    assert models.get("two").name == "two"
    with pytest.raises(UnknownModel, match=r"`three` does not exist\. This router serves `one`, `two`\."):
        models.get("three")
    with pytest.raises(InvalidRequest, match="model must be named: this router serves `one`, `two`"):
        models.get(None)
    models.leave("b")
    assert models.get(None).name == "one", "the only one of which a node is in use"
    assert models.get("two").name == "two", "whose node may come back"
    models.forget("b")
    with pytest.raises(UnknownModel):
        models.get("two")


def test_a_model_may_have_several_names() -> None:
    models = Models()
    models.join(dataclasses.replace(node("a", "one"), model_aliases=("gpt-4", "two")), TOKENIZER)
    models.join(node("b", "two"), TOKENIZER)
    named, aliased = models.get("one"), models.get("gpt-4")
    assert (named.name, aliased.name) == ("one", "gpt-4")
    assert dataclasses.replace(aliased, name="one") == named
    assert models.get("two").version != named.version, "a name comes before an alias"
    assert [model.name for model in models.served()] == ["one", "two", "gpt-4"]
    with pytest.raises(UnknownModel, match="serves `one`, `two`, `gpt-4`"):
        models.get("three")
    models.join(node("c", "one"), TOKENIZER)
    with pytest.raises(UnknownModel):
        models.get("gpt-4")


def test_versions_are_drawn_by_their_shares() -> None:
    shares: dict[str, float] = {}
    models = Models(lambda name: shares, Random(0))
    old, new = node("a", fingerprint="old"), node("b", fingerprint="new", max_model_len=32)
    old, new = (dataclasses.replace(info, max_logprobs=most) for info, most in ((old, 50), (new, 5)))
    models.join(old, TOKENIZER)
    models.join(new, TOKENIZER)
    assert models.get("m").version == version_of(new), "none can take a request, and the newer will first"
    shares.update({version_of(old).id: 0.75, version_of(new).id: 0.25})
    count = [model.version for model in drawn(models, "m")].count(version_of(old))
    assert 40 <= count <= 56
    shares.pop(version_of(new).id)
    assert {model.version for model in drawn(models, "m")} == {version_of(old)}
    assert [(model.name, model.max_model_len, model.max_logprobs) for model in models.served()] == [("m", 32, 5)]


def test_of_a_versions_nodes_the_smallest_limits_count() -> None:
    models = Models()
    for name, length, num_logprobs in (("a", 64, 50), ("b", 32, 335), ("c", 48, 20)):
        models.join(dataclasses.replace(node(name, max_model_len=length), max_logprobs=num_logprobs), TOKENIZER)
    assert (models.get("m").max_model_len, models.get("m").max_logprobs) == (32, 20)
    models.leave("c")
    assert (models.get("m").max_model_len, models.get("m").max_logprobs) == (32, 50)
    models.leave("a")
    models.leave("b")
    assert models.get("m").max_logprobs == 335, "as of the last one"


def test_a_version_is_forgotten_when_its_address_serves_another() -> None:
    models = Models()
    models.join(node("a", fingerprint="old"), TOKENIZER, "here")
    models.leave("a")
    assert models.get("m").version == version_of(node("a", fingerprint="old"))
    models.join(node("b", fingerprint="new"), TOKENIZER, "here")
    assert {model.version for model in drawn(models)} == {version_of(node("b", fingerprint="new"))}


def test_the_newest_node_describes_its_version() -> None:
    models = Models()
    models.join(node("a"), TOKENIZER)
    models.join(dataclasses.replace(node("b"), chat_template="{{ messages }}"), TOKENIZER)
    assert models.get(None).chat_template == "{{ messages }}"
    assert models.get(None).chat is not None


def test_prompts_are_hashed_with_the_block_size_that_nodes_have_now() -> None:
    """They were all started again with another one."""
    models = Models()
    models.join(node("a"), TOKENIZER, "here")
    assert models.get(None).block_size == 16
    models.leave("a")
    again = node("b")
    models.join(dataclasses.replace(again, layout=dataclasses.replace(again.layout, block_size=32)), TOKENIZER, "here")
    assert models.get(None).block_size == 32


async def test_a_tokenizer_that_another_node_fails_to_send_comes_from_the_next_one() -> None:
    models, fails, fetched = Models(), asyncio.Event(), list[str]()

    async def hangs() -> bytes:
        fetched.append("a")
        await fails.wait()
        raise NodeUnavailable("no answer")

    async def answers() -> bytes:
        fetched.append("b")
        return (CHECKPOINT / "tokenizer.json").read_bytes()

    first = asyncio.create_task(models.tokenizer(node("a"), hangs))
    others = [asyncio.create_task(models.tokenizer(node(name), answers)) for name in "bc"]
    await asyncio.sleep(0)
    fails.set()
    with pytest.raises(NodeUnavailable, match="no answer"):
        await first
    assert [(await other).digest for other in others] == [DIGEST] * 2
    assert fetched == ["a", "b"]
