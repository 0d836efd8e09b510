"""How a chat becomes a prompt: the fields that chats and `/tokenize` share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from baton.errors import InvalidRequest
from router.http.fields import CONFIG, TemplateValues, ValueLimits, bound_values, num_chars
from router.limits import (
    MAX_CHAT_TEMPLATE_CHARS,
    MAX_DOCUMENT_CHARS,
    MAX_DOCUMENT_DEPTH,
    MAX_DOCUMENT_VALUES,
    MAX_DOCUMENTS,
)

_LIMITS = ValueLimits(MAX_DOCUMENT_VALUES, MAX_DOCUMENT_CHARS, MAX_DOCUMENT_DEPTH)

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names by which chat templates are told whether the model is to reason."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Documents = Annotated[
    list[dict[str, Any]],
    Field(max_length=MAX_DOCUMENTS),
    AfterValidator(lambda documents: bound_values(documents, _LIMITS)),
]


class TemplateFields(BaseModel):
    """A template gets `documents` and `reasoning_effort` as variables; they come before those of the same name in
    `chat_template_kwargs`, as in vLLM, and these before what else the effort says."""

    model_config = CONFIG
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = Field(None, max_length=MAX_CHAT_TEMPLATE_CHARS)
    chat_template_kwargs: TemplateValues | None = None
    documents: Documents | None = Field(
        None, description=f"for the template, as `documents`; all together at most {MAX_DOCUMENT_CHARS} characters"
    )
    reasoning_effort: ReasoningEffort | None = None

    def check_template(self) -> None:
        """Raises InvalidRequest for contradictions."""
        if self.continue_final_message and self.add_generation_prompt:
            text = "`continue_final_message` and `add_generation_prompt` exclude each other: a prompt ends in one way."
            raise InvalidRequest(text, "continue_final_message")

    @property
    def variables(self) -> dict[str, Any]:
        """What a template gets beside the messages."""
        effort = self.reasoning_effort
        named = {"documents": self.documents, "reasoning_effort": effort}
        told = {} if effort is None else effort_variables(effort)
        given = self.chat_template_kwargs or {}
        return {**told, **given, **{name: value for name, value in named.items() if value is not None}}

    @property
    def template_size(self) -> int:
        """In characters."""
        return len(self.chat_template or "") + (num_chars(self.documents) if self.documents else 0)


def effort_variables(effort: str) -> dict[str, Any]:
    """What says to a template how much the model is to reason. Most know only whether it is to: `none` says no."""
    return {**dict.fromkeys(THINKING_VARIABLES, effort != "none"), "reasoning_effort": effort}
