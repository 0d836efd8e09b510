"""Turns chat messages into prompt text with the model's own Jinja template.

The environment offers what chat templates expect (transformers, `utils/chat_template_utils.py`): trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, and the `generation` tag. It is
sandboxed, because a template comes from a model's repository.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from baton.errors import InvalidRequest

_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that is to be continued. A template that trims messages takes the blank at its end."""

_READS_THINKING = re.compile(r"""message\.thinking\b|message\[['"]thinking['"]]|['"]thinking['"] in message\b""")
"""In a template. Others have a variable of that name."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the model's text for training; here the tag is ignored and its body kept."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it a set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A compiled template. If it cannot be compiled, it refuses all messages and says why."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._reads_thinking = _READS_THINKING.search(source) is not None
        self._template: jinja2.Template | None = None
        self._broken = ""
        try:
            self._template = _environment().from_string(source)
            self._template.globals = dict(self._template.globals)  # each rendering copies them: of a ChainMap, slowly
        except Exception as error:  # noqa: BLE001  (Jinja's, or Python's of the program that it makes of it)
            self._broken = f"the chat template cannot be compiled: {error}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for messages of `role`, `content` and what else OpenAI's messages have, and `tools` likewise.
        Raises InvalidRequest with the template's complaint.

        With `continue_final_message` the prompt ends within the last message, and the answer goes on from there; then
        `add_generation_prompt` does not matter. In the way of transformers' `render_jinja_template`.
        """
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables, tools)
        *others, final = messages
        marked = {**final, "content": final["content"] + _CUT}
        return _cut(self._render([*others, marked], False, variables, tools), final["content"].strip())

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        if self._template is None:
            raise InvalidRequest(self._broken, "messages")
        context = self._template.new_context(
            {
                **self._special_tokens,
                "tools": None,
                "documents": None,
                **(variables or {}),
                **({"tools": tools} if tools else {}),
                "messages": [self._with_thinking(self._known_role(message)) for message in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )
        try:
            return "".join(self._template.root_render_func(context))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", "messages") from error
        finally:
            _take_apart(context)

    def _known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Turn `developer`, OpenAI's newer name for system instructions, into `system` for older templates."""
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return dict(message)

    def _with_thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        """Name reasoning `thinking` for a template that reads it: gpt-oss's. That takes one text before a tool call, to
        which content is added, therefore."""
        thought = message.get("reasoning_content")
        if not self._reads_thinking or not isinstance(thought, str):
            return message
        if message.get("tool_calls") and message["content"]:
            return {**message, "thinking": f"{thought}\n{message['content']}", "content": ""}
        return {**message, "thinking": thought}


def _take_apart(context: jinja2.runtime.Context) -> None:
    """After its rendering. A context and its template's macros keep each other, and a macro that calls itself keeps
    itself: all of that, and the messages, would stay until garbage is collected."""
    for value in context.vars.values():
        if isinstance(value, jinja2.runtime.Macro):
            vars(value).clear()
    context.vars.clear()
    context.parent.clear()


def _cut(text: str, final: str) -> str:
    """A rendered chat up to the mark in its last message, whose content is `final`. Raises InvalidRequest."""
    before, mark, after = text.rpartition(_CUT.strip())
    if not mark or final not in before:
        raise InvalidRequest("the chat template changes the last message, so it cannot be continued", "messages")
    return before if after.startswith(_CUT[-1]) else before.rstrip()


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role` of a dict, without looking for an attribute of that name first, which takes much longer."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
