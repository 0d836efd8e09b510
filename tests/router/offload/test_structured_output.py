"""How clients say what answers must match, and the process that tries whether it compiles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, InvalidRequest, Overloaded
from baton.node_info import GenerationDefaults
from baton.structured_output.constraint import MAX_STRUCTURED_CHARS, StructuredBackend, StructuredKind, StructuredOutput
from baton.structured_output.guidance import why_invalid
from router import refusals
from router.offload import grammars
from router.offload.grammars import GrammarChecker
from router.offload.worker_process import WorkerProcess
from router.text.models import ServedModel
from router.text.structured_output import structured_output_of
from router.text.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).parents[3] / "engine" / "checkpoints" / "baton-tiny"

SCHEMA = {"type": "integer"}
AS_JSON = StructuredOutput(StructuredKind.JSON, '{"type":"integer"}')
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
AS_TAG = StructuredOutput(StructuredKind.STRUCTURAL_TAG, '{"type":"structural_tag","format":{"type":"any_text"}}')
HOSTILE = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}


def of(
    response_format: dict[str, Any] | None = None, structured: dict[str, Any] | None = None, **guided: Any
) -> StructuredOutput | None:
    return structured_output_of(response_format, structured, guided)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(StructuredKind.JSON_OBJECT)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_JSON),
        ({"structured": {"json": SCHEMA}}, AS_JSON),
        ({"structured": {"json": '{"type":"integer"}', "regex": None}}, AS_JSON),
        ({"structured": {}}, None),
        ({"structured": {"json_object": True}}, StructuredOutput(StructuredKind.JSON_OBJECT)),
        ({"structured": {"json_object": False}}, None),
        ({"structured": {"choice": ["a"]}}, StructuredOutput(StructuredKind.CHOICE, '["a"]')),
        ({"guided_json": SCHEMA, "guided_regex": None}, AS_JSON),
        ({"guided_regex": "a+"}, StructuredOutput(StructuredKind.REGEX, "a+")),
        ({"structured": {"structural_tag": TAG}}, AS_TAG),
        ({"structured": {"structural_tag": AS_TAG.text}}, AS_TAG),
        ({"response_format": TAG}, AS_TAG),
        ({"guided_grammar": "start: A"}, StructuredOutput(StructuredKind.GRAMMAR, "start: A")),
    ],
)
def test_all_forms_are_understood(said: dict[str, Any], meant: StructuredOutput | None) -> None:
    assert of(**said) == meant


@pytest.mark.parametrize(
    ("said", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"response_format": {"type": 3}}, "response_format", "unknown"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "exclude each other"),
        ({"structured": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "one of"),
        ({"structured": {"frob": "x"}}, "structured_outputs", "structural_tag, not `frob`"),
        ({"structured": {"structural_tag": "x"}}, "structured_outputs", "must be a JSON object"),
        ({"structured": {"structural_tag": 3}}, "structured_outputs", "a structural tag must be an object"),
        ({"response_format": {"type": "structural_tag"}}, "structured_outputs", "needs `format`"),
        ({"structured": {"json": 3}}, "structured_outputs", "must be an object"),
        ({"structured": {"regex": ""}}, "structured_outputs", "not empty"),
        ({"guided_choice": ["a", ""]}, "structured_outputs", "non-empty"),
        ({"guided_regex": "a" * (MAX_STRUCTURED_CHARS + 1)}, "structured_outputs", str(MAX_STRUCTURED_CHARS)),
    ],
)
def test_mistakes_are_named(said: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        of(**said)
    assert refused.value.param == param
    assert says in refused.value.message


def served(backend: StructuredBackend) -> ServedModel:
    tokenizer = Tokenizer((CHECKPOINT / "tokenizer.json").read_bytes())
    defaults = GenerationDefaults((0,))
    return ServedModel("m", 64, 4096, tokenizer, None, defaults, structured_outputs_backend=backend)


class Checker(GrammarChecker):
    """For one model."""

    def __init__(self, backend: StructuredBackend) -> None:
        super().__init__()
        self.model = served(backend)

    async def says(self, structured: StructuredOutput, client: str = "") -> None:
        await self.check(structured, self.model, client)

    @property
    def worker(self) -> WorkerProcess:
        """Which nearly all are compiled by."""
        worker = self._compilers[0]._worker
        assert worker is not None
        return worker


@pytest.fixture
async def checker() -> AsyncIterator[Checker]:
    checker = Checker(StructuredBackend.GUIDANCE)
    yield checker
    checker.close()


async def test_a_schema_waits_for_others_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MAX_WAIT_S", 0.01)
    counted: list[BatonError] = []
    checker = GrammarChecker(counted.append)
    async with refusals.turn(checker._compilers[0].lock.of("another"), 1.0, "", counted.append):
        with pytest.raises(Overloaded, match="have been compiled") as refused:
            await checker.check(AS_JSON, served(StructuredBackend.GUIDANCE), "")
    assert counted == [refused.value]


async def test_a_hostile_schema_is_refused_in_time_and_the_next_is_served(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.says(AS_JSON)  # starts the process
    first = checker.worker
    hostile = StructuredOutput(StructuredKind.JSON, json.dumps(HOSTILE))
    with pytest.raises(InvalidRequest, match="within 1 s"):
        await checker.says(hostile)
    with monkeypatch.context() as remembered:
        remembered.delattr(WorkerProcess, "answer")
        with pytest.raises(InvalidRequest, match="within 1 s"):
            await checker.says(hostile)
    await asyncio.gather(*(checker.says(StructuredOutput(StructuredKind.REGEX, "a" * n)) for n in range(1, 9)))
    assert checker.worker is first
    assert not first.ended, "a start takes long, with a large vocabulary"


async def test_what_takes_long_keeps_only_its_like_waiting(checker: Checker) -> None:
    """Of the same client, too: behind a proxy all are one."""
    async with refusals.turn(checker._compilers[1].lock.of(""), 1.0, "", refusals.uncounted):
        await checker.says(AS_JSON)
        with pytest.raises(InvalidRequest, match="regex"):
            await checker.says(StructuredOutput(StructuredKind.REGEX, "(a"))


async def test_a_client_that_leaves_does_not_end_the_process(checker: Checker) -> None:
    await checker.says(AS_JSON)
    first = checker.worker
    leaves = asyncio.create_task(checker.says(StructuredOutput(StructuredKind.JSON, json.dumps(HOSTILE))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it is being compiled
    leaves.cancel()
    await checker.says(StructuredOutput(StructuredKind.REGEX, "a"), "another")
    assert leaves.cancelled()
    assert checker.worker is first
    assert not first.ended


def child_of(process: int) -> int:
    [child] = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(child)


async def test_a_checker_that_is_closed_leaves_no_process(checker: Checker) -> None:
    await checker.says(AS_JSON)
    child = os.pidfd_open(child_of(checker.worker._process.pid))
    try:
        signal.pidfd_send_signal(child, signal.SIGSTOP)  # as if it were busy: it does not notice that its input ends
        checker.close()
        ended, _, _ = select.select([child], [], [], 5.0)
        assert ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)


def stop(process: int) -> None:
    """Until all of its threads have stopped: one that has not heard of it yet may still answer."""
    os.kill(process, signal.SIGSTOP)
    threads = list(Path(f"/proc/{process}/task").iterdir())
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        time.sleep(0.01)


async def test_a_schema_is_not_at_fault_if_the_process_gets_no_cpu(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.says(StructuredOutput(StructuredKind.REGEX, "b"))
    counted: list[BatonError] = []
    checker._on_refused = counted.append
    stop(child_of(checker.worker._process.pid))
    with monkeypatch.context() as impatient:
        impatient.setattr(grammars, "_PATIENCE_S", 0.1)
        with pytest.raises(Overloaded, match="too busy") as refused:
            await checker.says(AS_JSON)
    assert counted == [refused.value]
    await checker.says(AS_JSON)


def chain(length: int) -> StructuredOutput:
    """Definitions that each refer to the next one."""
    refs = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return StructuredOutput(
        StructuredKind.JSON, json.dumps({"$ref": "#/$defs/d0", "$defs": {**refs, f"d{length}": {"type": "integer"}}})
    )


async def test_what_is_nested_too_deeply_says_so(checker: Checker) -> None:
    await checker.says(chain(300))
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await checker.says(chain(4000))  # which ends the process


async def test_json_that_is_nested_too_deeply_leaves_the_process_alive(checker: Checker) -> None:
    await checker.says(AS_JSON)
    first = checker.worker
    with pytest.raises(InvalidRequest, match="recursion depth"):
        await checker.says(StructuredOutput(StructuredKind.JSON, '{"items":' * 20_000 + "{}" + "}" * 20_000))
    await checker.says(StructuredOutput(StructuredKind.REGEX, "b"))
    assert checker.worker is first


async def test_what_took_too_long_is_tried_again_later(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have been stopped, or its machine busy."""
    now = [0.0]
    checker._clock = lambda: now[0]
    await checker.says(StructuredOutput(StructuredKind.REGEX, "b"))  # starts the process

    async def late(self: WorkerProcess, question: str, limit_s: float) -> str:
        return "false"

    with monkeypatch.context() as held_up:
        held_up.setattr(WorkerProcess, "answer", late)
        with pytest.raises(InvalidRequest, match="within 1 s"):
            await checker.says(AS_JSON)
    with pytest.raises(InvalidRequest, match="within 1 s"):
        await checker.says(AS_JSON)
    now[0] = 31.0
    await checker.says(AS_JSON)


async def test_a_process_that_dies_is_started_again_and_answers_are_remembered(checker: Checker) -> None:
    await checker.says(AS_JSON)
    checker.worker.end()
    await checker.says(AS_JSON)
    assert checker.worker.ended, "what is known needs no process"
    with pytest.raises(InvalidRequest, match="regex"):
        await checker.says(StructuredOutput(StructuredKind.REGEX, "(a"))


@pytest.mark.parametrize(
    ("within", "reason"),
    [
        ({"type": "json_schema", "json_schema": {"type": "frob"}}, "failed to compile JSON schema: Invalid type: frob"),
        ({"type": "regex", "pattern": "(a"}, 'invalid regex "(a" (in regex): regex parse error:\n    (a\n    ^\n'),
    ],
)
def test_a_reason_quotes_nothing_that_the_client_has_not_written(within: object, reason: str) -> None:
    """Behind reasoning or beside tools, a constraint is a part of a grammar of the router's own."""
    elements = [{"type": "const_string", "value": "first"}, within]
    tag = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
    told = why_invalid(StructuredOutput(StructuredKind.STRUCTURAL_TAG, tag)) or ""
    assert told.startswith(reason)
    assert "start:" not in told


async def test_a_long_text_is_remembered_by_its_digest_alone(checker: Checker) -> None:
    await checker.says(StructuredOutput(StructuredKind.REGEX, "a" * 10_000))
    with pytest.raises(InvalidRequest) as refused:
        await checker.says(StructuredOutput(StructuredKind.GRAMMAR, "start: " + "?" * 10_000))
    assert len(repr(checker._known)) < 5_000
    assert len(refused.value.message) < 3_000


@pytest.mark.timeout(60)
async def test_xgrammar_checks_with_the_model_s_own_vocabulary() -> None:
    pytest.importorskip("xgrammar", reason="the extra [xgrammar] is not installed")
    checker = Checker(StructuredBackend.XGRAMMAR)
    try:
        await checker.says(AS_JSON)
        for text, reason in (('{"uniqueItems": true}', "does not enforce `uniqueItems`"), ('{"type": "frob"}', "frob")):
            with pytest.raises(InvalidRequest, match=reason):
                await checker.says(StructuredOutput(StructuredKind.JSON, text))
        with pytest.raises(InvalidRequest, match="GBNF"):
            await checker.says(StructuredOutput(StructuredKind.GRAMMAR, 'start: "a"'))
        first = checker.worker
        checker.model = served(StructuredBackend.GUIDANCE)
        await checker.says(StructuredOutput(StructuredKind.GRAMMAR, 'start: "a"'))
        assert first.ended, "each backend has a process of its own"
    finally:
        checker.close()


async def test_a_tokenizer_that_xgrammar_does_not_know_ends_no_process() -> None:
    checker = Checker(StructuredBackend.XGRAMMAR)
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text()) | {"decoder": None}
    checker.model = replace(checker.model, tokenizer=Tokenizer(json.dumps(tokenizer).encode()))
    try:
        with pytest.raises(InvalidRequest, match=r"decoder of its tokenizer\.json is null"):
            await checker.says(AS_JSON)
    finally:
        checker.close()
