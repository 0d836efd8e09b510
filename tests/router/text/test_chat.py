"""Chat templates: what transformers' templates are written against works, and refusals say why."""

import gc
import json

import pytest

from baton.errors import InvalidRequest
from router.text.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "a <b> 'c'"}]


def render(source: str, messages=MESSAGES) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def test_blocks_are_trimmed_and_special_tokens_known():
    source = "{{ bos_token }}\n  {% for m in messages %}\n[{{ m.role }}] {{ m['content'] }}\n  {% endfor %}\n"
    assert render(source) == "<s>\n[user] a <b> 'c'\n"


def test_methods_of_a_dict_come_before_its_names():
    schema = {"type": "array", "items": {"type": "string"}}
    tools = [{"function": {"parameters": schema}}]
    source = (
        "{% set p = tools[0].function.parameters %}{% for name, _ in p.items() %}{{ name }} {% endfor %}{{ p.type }}"
    )
    assert ChatTemplate(source, {}).render(MESSAGES, tools=tools) == "type items array"


def test_json_is_not_escaped_for_html():
    assert render("{{ messages[0].content | tojson }}") == "\"a <b> 'c'\""
    assert render("{{ {'ä': 1} | tojson(indent=1) }}") == '{\n "ä": 1\n}'


def test_loop_controls_the_generation_tag_and_the_date():
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}x{{ bos_token }}{% endgeneration %}y") == "x<s>y"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_variables_of_the_request_are_seen_and_cannot_replace_the_messages():
    template = ChatTemplate("{{ thinking }}{{ messages | length }}", {})
    assert template.render(MESSAGES, variables={"thinking": "on", "messages": []}) == "on1"


def test_what_the_template_refuses_is_said():
    with pytest.raises(InvalidRequest, match="no odd turns"):
        render("{{ raise_exception('no odd turns') }}")
    with pytest.raises(InvalidRequest, match="refuses"):
        render("{{ messages[7].content.upper() }}")


DEEP = "{{ " + 3000 * "(" + "1" + 3000 * ")" + " }}"


@pytest.mark.parametrize("source", ["{% for %}", "{% break %}", DEEP, "{{ " + 5000 * "9" + " }}"])
def test_a_broken_template_refuses_all_messages(source):
    """And no more: a node whose template it is computes completions."""
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        template.render(MESSAGES)


def test_a_template_cannot_reach_into_the_process():
    with pytest.raises(InvalidRequest, match="refuses"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}")


@pytest.mark.parametrize(("known", "role"), [("developer", "developer"), ("", "system")])
def test_developer_is_system_to_templates_that_do_not_know_it(known, role):
    messages = [{"role": "developer", "content": ""}]
    assert render("{# " + known + " #}{{ messages[0].role }}", messages) == role


FINAL = [*MESSAGES, {"role": "assistant", "content": " The answer is "}]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (PLAIN, "[user]a <b> 'c'</s>[assistant] The answer is "),
        (PLAIN.replace("m.content", "m.content | trim"), "[user]a <b> 'c'</s>[assistant]The answer is"),
    ],
)
def test_the_last_message_can_be_continued(source, prompt):
    template = ChatTemplate(source, {})
    assert template.render(FINAL, continue_final_message=True) == prompt
    assert template.render(FINAL).endswith("</s>>")
    assert FINAL[-1]["content"] == " The answer is "


@pytest.mark.parametrize("content", ["m.content | upper", "m.content[-5:]", "m.content.split('The')[-1]", "'x'"])
def test_a_message_that_the_template_changes_cannot_be_continued(content):
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate(PLAIN.replace("m.content", content), {}).render(FINAL, continue_final_message=True)


THINKER = """{%- for message in messages %}
{%- if message.content and message.thinking and message.tool_calls %}{{ raise_exception('not both') }}{% endif %}
{%- if "thinking" in message %}{{ '[' ~ message.thinking ~ ']' }}{% endif %}
{{- message.content }}|
{%- endfor %}"""


def test_reasoning_is_thinking_to_gpt_oss():
    """Its template takes either content or thinking before a call, as analysis."""
    thought = {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Hm."}
    call = {"function": {"name": "f", "arguments": {}}}
    assert render(THINKER, [*MESSAGES, thought]) == "a <b> 'c'|[Hm.]Yes.|"
    assert render(THINKER, [{**thought, "tool_calls": [call]}]) == "[Hm.\nYes.]|"
    assert render(THINKER, [{**thought, "content": "", "tool_calls": [call]}]) == "[Hm.]|"


@pytest.mark.parametrize("source", ["{{ thinking }}", "{% if thinking %}{% endif %}{{ message_thinking }}"])
def test_other_templates_get_reasoning_under_its_own_names(source):
    thought = {"role": "assistant", "content": "", "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert json.loads(render("{{ messages[0] | tojson }}" + source, [thought])) == thought


def test_a_rendering_leaves_nothing_to_the_garbage_collector():
    source = (
        "{% macro nested(items) %}{% for i in items %}{{ nested(i) if i is iterable else i }}{% endfor %}{% endmacro %}"
        "{% macro twice(text) %}{{ text }}{{ text }}{% endmacro %}{{ nested([1, [2]]) }}{{ twice(messages[0].role) }}"
    )
    template = ChatTemplate(source, {})
    gc.collect()
    gc.disable()
    try:
        assert template.render(MESSAGES) == "12useruser"
        assert gc.collect() == 0
    finally:
        gc.enable()
