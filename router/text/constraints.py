"""Combines what an answer must match with its reasoning, which comes first and is free, and with its tool calls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import TracebackType

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from baton.structured_output.structural_tag import Format, load_structural_tag
from router.text.answer_reader import AnswerReading
from router.text.call_plan import CallPlan
from router.text.generation_request import GenerationRequest

_JSON_KINDS = (StructuredKind.JSON, StructuredKind.JSON_OBJECT)


def constrained(wanted: GenerationRequest, plan: CallPlan, reading: AnswerReading | None) -> GenerationRequest:
    """The request as the nodes and the reading of its answers need it. Raises InvalidRequest."""
    if reading is not None and reading.keeps_special_tokens:
        wanted = dataclasses.replace(wanted, skip_special_tokens=False)
    if plan.custom:
        found = [(name, custom.constraint) for name, custom in plan.custom.items()]
        definitions = [(name, constraint) for name, constraint in found if constraint is not None]
        wanted = dataclasses.replace(wanted, definitions=definitions)
    reasoning = reading.reasoning_format() if reading else None
    asked: StructuredOutput | None = wanted.sampling.get("structured_outputs")
    if asked is not None and plan.is_forced:
        text = "A `tool_choice` that requires a call and a constraint such as `structured_outputs` exclude each other."
        raise InvalidRequest(text, "tool_choice")
    body = plan.must_match
    if asked is not None:
        alternative = plan.alternative if asked.kind in _JSON_KINDS else None
        body = format_of(asked) if reasoning or alternative else None
        if body and alternative:
            body = {"type": "or", "elements": [alternative, body]}
    if body is None:
        return wanted
    if reading is not None and (asked is not None or plan.is_forced):
        reading.keep_to_format()
    whole = {"type": "sequence", "elements": [reasoning, body]} if reasoning else body
    text = json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False, separators=(",", ":"))
    structured = StructuredOutput(StructuredKind.STRUCTURAL_TAG, text)
    return dataclasses.replace(wanted, sampling={**wanted.sampling, "structured_outputs": structured})


def format_of(structured: StructuredOutput) -> Format:
    """A constraint as a part of a structural tag. Raises InvalidRequest."""
    match structured.kind:
        case StructuredKind.JSON_OBJECT:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case StructuredKind.JSON:
            return {"type": "json_schema", "json_schema": _schema(structured.text)}
        case StructuredKind.REGEX:
            return {"type": "regex", "pattern": structured.text}
        case StructuredKind.CHOICE:
            return {"type": "or", "elements": [{"type": "const_string", "value": c} for c in structured.choices()]}
        case StructuredKind.GRAMMAR:
            return {"type": "grammar", "grammar": structured.text}
        case StructuredKind.STRUCTURAL_TAG:
            return load_structural_tag(structured.text)


class naming_constraint:  # noqa: N801  (a function to its callers, which `contextmanager` makes three times as slow)
    """A constraint that is refused within is named after what the client sent: the field that `find_field` finds, or if
    there is none the tools of `plan`."""

    def __init__(self, plan: CallPlan, find_field: Callable[[], str | None]) -> None:
        self._plan = plan
        self._find_field = find_field

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not isinstance(error, InvalidRequest) or error.param != "structured_outputs":
            return
        reason = error.message.removeprefix("structured_outputs: ").removeprefix("structural_tag: ")
        if (field := self._find_field()) is not None:
            raise InvalidRequest(f"{field}: {reason}", field) from None
        if self._plan.must_match is not None:
            raise InvalidRequest(f"The schemas of `tools` cannot constrain calls: {reason}", "tools") from None


def _schema(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs: json is not JSON: {error}", "structured_outputs") from None
