"""What models write when they call tools, as published with the models and in the tests of other engines."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """`calls`: names and the texts of arguments."""

    parser: str
    text: str
    content: str
    calls: list[tuple[str, str]]


_WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "place": {"type": ["object", "null"]},
        "near": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        "share": {"type": "number"},
        "note": {"type": ["string", "null"]},
        "hint": {"type": "string", "nullable": True},
    },
}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": _WEATHER_SCHEMA,
    "add": {},
    "multiply": {"properties": "no object"},
    "find-all.v2": {},
    "search": {
        "$ref": "#/$defs/Search",
        "$defs": {
            "Search": {
                "properties": {
                    "where": {"anyOf": [{"$ref": "#/$defs/Where"}, {"type": "null"}]},
                    "all": {"allOf": [{"$ref": "#/$defs/a~1b"}]},
                    "page": {"enum": [1, 2]},
                    "most": {"const": 10},
                    "maybe": {"anyOf": [{"type": ["integer", "null"]}]},
                    "order": {"items": {"type": "integer"}},
                    "again": {"$ref": "#/$defs/Loop"},
                    "other": {"$ref": "elsewhere#/$defs/Where"},
                    "anchor": {"$ref": "#Where"},
                },
                "additionalProperties": {"type": "number"},
            },
            "Where": {"type": "object", "properties": {"lat": {"$ref": "#/$defs/Number"}, "zip": {"type": "string"}}},
            "Number": {"type": "number"},
            "Loop": {"$ref": "#/$defs/Loop"},
            "a/b": {"type": "boolean"},
        },
    },
}
DALLAS = '{"city": "Dallas", "state": "TX"}'

HERMES = [
    Case("hermes", "No tool is needed: 1 < 2.", "No tool is needed: 1 < 2.", []),
    Case(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {DALLAS}}}\n</tool_call>',
        "",
        [("get_weather", DALLAS)],
    ),
    Case(
        "hermes",
        "I'll look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln \\"A\\" \\u00e4", "x": [1, -2.5e3, null]}}\n'
        '</tool_call>\n<tool_call>\n{"arguments": {"a": {"name": "add"}}, "name": "add"}\n</tool_call>',
        "I'll look.\n",
        [
            ("get_weather", '{"city": "Köln \\"A\\" \\u00e4", "x": [1, -2.5e3, null]}'),
            ("add", '{"a": {"name": "add"}}'),
        ],
    ),
    Case("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call> Done.', " Done.", [("add", "{}")]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    # arguments as a string that has the object, as Granite 4 writes them, and the tests of vLLM have them
    Case("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', "", [("add", "{}")]),
    Case(
        "hermes",
        r'<tool_call>{"arguments": "{\"a\": \"K\u00f6ln\\n\"}\n", "name": "add"}</tool_call> Done.',
        " Done.",
        [("add", r'{"a": "Köln\n"}')],
    ),
    # not calls: nothing is lost
    *(
        Case("hermes", text, text, [])
        for text in (
            "  \n",
            "<tool_cal",
            "a <tool_call> is a tag",
            '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>',
            "<tool_call>{'name': 'add', 'arguments': {'a': 1}}</tool_call>",
            '<tool_call>{"name": "add", "arguments": {\'a\': 1}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "hello"}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "{} []"}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": ',
            '<tool_call>{"name": "add"}</tool_call>',
            '<tool_call>{"name": "add", "extra": 1, "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": {"a": 1}}</tool_call>',
            '\n<tool_call>{"name": "add", "arg',
        )
    ),
    Case(
        "hermes",
        '<tool_call>oops <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "<tool_call>oops ",
        [("add", '{"a": 1}')],
    ),
    # halves of surrogate pairs, which no reader of JSON takes for text, unless they are a pair
    Case(
        "hermes",
        r'<tool_call>{"name": "add", "arguments": {"\uDE00": "\ud83d\ude00 \uD83D \ud83d\ud83d\ude00 '
        r'\ud83d\n\ud83d\u00e4"}}',
        "",
        [("add", r'{"\ufffd": "\ud83d\ude00 \ufffd \ufffd\ud83d\ude00 \ufffd\n\ufffd\u00e4"}')],
    ),
    *(
        Case("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": "{text}', "", [("add", f'{{"a": "{text}')])
        for text in (r"\ud83d", r"\u", r"\ud8", r"\ud83d\ude00", "\\\\")
    ),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d\\ux', "x", [("add", '{"a": "\\ufffd\\u')]),
    # cut off or broken within arguments: what came before is kept as arguments
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": "one\ntwo', "", [("add", '{"a": "one\\ntwo')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, b: 2}}', "b: 2}}", [("add", '{"a": 1, ')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": truth}}', "truth}}", [("add", '{"a": ')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": [True]}}', "True]}}", [("add", '{"a": [')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": 3..5}}', "3..5}}", [("add", '{"a": ')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": -3.', "", [("add", '{"a": -3.')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": fal', "", [("add", '{"a": fal')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\x"}}', 'x"}}', [("add", '{"a": "\\')]),
    Case("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, !', ", !", [("add", '{"a": 1}')]),
]
LLAMA3 = [
    Case("llama3_json", f'{{"name": "get_weather", "parameters": {DALLAS}}}', "", [("get_weather", DALLAS)]),
    Case(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "1"}} ; {"name": "multiply", '
        '"arguments": {}}',
        "",
        [("add", '{"a": "1"}'), ("multiply", "{}")],
    ),
    Case(
        "llama3_json",
        'Here is the result: {"name": "add", "parameters": {}} Would you like {more}?',
        "Here is the result:  Would you like {more}?",
        [("add", "{}")],
    ),
    *(
        Case("llama3_json", text, text, [])
        for text in (
            '{"parameters": {}}',
            '{"name": "add"}',
            '{"name": "add", "parameters": {invalid json}',
            'A JSON object: {"a": {"b": 1}};',
            '<|python_tag|>brave_search.call(query="x")',
        )
    ),
]
MISTRAL = [
    Case(
        "mistral",
        'Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 3.5, "b": 4}}, '
        '{"arguments":{"name": "John Doe"}, "name": "multiply"}]\nBye',
        "Hello\nBye",
        [("add", '{"a": 3.5, "b": 4}'), ("multiply", '{"name": "John Doe"}')],
    ),
    Case(
        "mistral",
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]multiply[ARGS]{"a": 3}',
        "",
        [("add", '{"a": 3.5, "b": 4}'), ("multiply", '{"a": 3}')],
    ),
    Case("mistral", '[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
    Case("mistral", "[TOOL_CALLS] not json at all", "[TOOL_CALLS] not json at all", []),
    Case("mistral", '[TOOL_CALLS]subtract{"a": 1}', '[TOOL_CALLS]subtract{"a": 1}', []),
    Case("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"x', ', {"x', [("add", "{}")]),
]
KIMI = [
    Case(
        "kimi_k2",
        "Some text <|tool_calls_section_begin|>\n<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "NYC"}<|tool_call_end|><|tool_call_begin|>functions.find-all.v2:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|>\n<|tool_calls_section_end|>",
        "Some text ",
        [("get_weather", '{"city": "NYC"}'), ("find-all.v2", "{}")],
    ),
    *(
        Case("kimi_k2", text, text, [])
        for text in (
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
            "<|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "<|tool_call_begin|>functions.add:0 {}",
        )
    ),
]
PYTHONIC = [
    Case(
        "pythonic",
        "[get_weather(city='San Francisco', exact=True, place={'lat': -1.5}, near=['a', []], role=None), add()]",
        "",
        [
            (
                "get_weather",
                '{"city": "San Francisco", "exact": true, "place": {"lat": -1.5}, "near": ["a", []], "role": null}',
            ),
            ("add", "{}"),
        ],
    ),
    Case(
        "pythonic",
        r"""[get_weather(city='Martha\'s (Vineyard', pattern="\d\n\"]")]""",
        "",
        [("get_weather", r"""{"city": "Martha's (Vineyard", "pattern": "\\d\n\"]"}""")],
    ),
    Case(
        "pythonic",
        """[add(a=r"\\d+\\"", b=R'\\n', c="", d='''it's\n"x"\\n\\d''', e=['', r''], bar="\\d")]""",
        "",
        [("add", r"""{"a": "\\d+\\\"", "b": "\\n", "c": "", "d": "it's\n\"x\"\n\\d", "e": ["", ""], "bar": "\\d"}""")],
    ),
    Case("pythonic", "<|python_start|>[add(a=true)]<|python_end|>", "", [("add", '{"a": true}')]),
    *(
        Case("pythonic", text, text, [])
        for text in (
            "[1, 2] [see below](https://a.b)",
            "[unknown(a=1)]",
            "[add(1)]",
            "[add(**{'a': 1})]",
            "[add(a=__import__('os'))]",
            "[add(a=b'z')]",
            "[add(a=1e999)]",
            "[add(a='\\ud800')]",
            "[add(a={1: 2})]",
            "[add(a=1]",
            "[add(a='x\ny')]",
            "[add(a='''x\n'')]",
            "[add(a=1 # no\n)]",
            "[add(a=(((",
            f"[add(a={'[' * 99})]",
            f"[add(a={'9' * 5000})]",
        )
    ),
    Case("pythonic", "[add(a=1), add(b'z')]", ", add(b'z')]", [("add", '{"a": 1}')]),
]
QWEN3_CODER = [
    Case(
        "qwen3_coder",
        "Sure! Let me check.<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n</parameter>\n"
        "<parameter=days>\n5\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=place>\n{'lat': 1.5, 'ok': True}\n</parameter>\n<parameter=near>\n[\"a\", 1]\n</parameter>\n"
        "<parameter=share>\n0.5\n</parameter>\n</function>\n</tool_call>",
        "Sure! Let me check.",
        [
            (
                "get_weather",
                '{"city": "Dallas", "days": 5, "exact": true, "place": {"lat": 1.5, "ok": true}, "near": ["a", 1], '
                '"share": 0.5}',
            )
        ],
    ),
    Case(
        "qwen3_coder",
        '<tool_call>\n<function=add>\n<parameter=code>\ndef f():\n    return "<p>"\n\n\n</parameter>\n'
        "<parameter=empty>\n\n</parameter>\n<parameter=x>null</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=multiply>\n</function>\n</tool_call>",
        "",
        [
            ("add", r'{"code": "def f():\n    return \"<p>\"\n\n", "empty": "", "x": null}'),
            ("multiply", "{}"),
        ],
    ),
    Case(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>Tokyo<parameter=days>two</function>",
        "",
        [("get_weather", '{"city": "Tokyo", "days": "two"}')],
    ),
    Case(
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>some long te",
        "",
        [("add", '{"a": "some long te"')],
    ),
    # an end of a function is missing, and that of a parameter
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>\n<tool_call><function=add></tool_call>"
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</tool_call> Done.",
        " Done.",
        [("add", '{"a": "1"}'), ("add", "{}"), ("add", '{"a": "2"}')],
    ),
    # a string that may not be null says so
    Case(
        "qwen3_coder",
        "<function=get_weather><parameter=city>null</parameter><parameter=note>null</parameter>"
        "<parameter=hint>\nNull\n</parameter><parameter=days>null</parameter></function>",
        "",
        [("get_weather", '{"city": "null", "note": null, "hint": null, "days": null}')],
    ),
    # types that a schema says by reference, by choices or by values, as those of pydantic do
    Case(
        "qwen3_coder",
        "<function=search><parameter=where>{'lat': 1}</parameter><parameter=all>true</parameter>"
        "<parameter=page>2</parameter><parameter=most>10</parameter><parameter=maybe>3</parameter>"
        "<parameter=order>[2, 1]</parameter><parameter=again>4</parameter><parameter=other>5</parameter>"
        "<parameter=anchor>6</parameter><parameter=more>0.5</parameter></function>",
        "",
        [
            (
                "search",
                '{"where": {"lat": 1}, "all": true, "page": 2, "most": 10, "maybe": 3, "order": [2, 1], "again": "4", '
                '"other": "5", "anchor": "6", "more": 0.5}',
            )
        ],
    ),
    *(
        Case("qwen3_coder", text, text, [])
        for text in ("<tool_call>\nx", "<function=unknown>\n</function>", "<function=add> oops", "<function=add")
    ),
]
GLM45 = [
    Case(
        "glm45",
        "I'll check it. <tool_call>get_weather\n    <arg_key>city</arg_key>\n    <arg_value>北京</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>add</tool_call>",
        "I'll check it. ",
        [("get_weather", '{"city": "北京", "days": 3}'), ("add", "{}")],
    ),
    # its template writes strings as they are, and other values as JSON, whether or not the schema tells their types
    Case(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>\nif a:\n    b()\n</arg_value>\n"
        "<arg_key>note</arg_key>\n<arg_value>null</arg_value>\n<arg_key>hint</arg_key>\n<arg_value>a\n</arg_value>\n"
        '<arg_key>x</arg_key>\n<arg_value>42</arg_value>\n<arg_key>y</arg_key>\n<arg_value>[1, {"a": true}]</arg_value>'
        "<arg_key>z</arg_key>\n<arg_value>some text</arg_value>\n</tool_call>",
        "",
        [
            (
                "get_weather",
                r'{"city": "\nif a:\n    b()\n", "note": null, "hint": "a\n", "x": 42, "y": [1, {"a": true}], '
                r'"z": "some text"}',
            )
        ],
    ),
    Case(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>null</arg_value></tool_call>",
        "",
        [("get_weather", '{"city": "null"}')],
    ),
    *(
        Case("glm45", text, text, [])
        for text in ("<tool_call>unknown\n</tool_call>", "<tool_call>add<arg_value>1</arg_value>", "<tool_call>")
    ),
]
CASES = [*HERMES, *LLAMA3, *MISTRAL, *KIMI, *PYTHONIC, *QWEN3_CODER, *GLM45]
