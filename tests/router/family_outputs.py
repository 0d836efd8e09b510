"""More of what models write when they call tools: Gemma and gpt-oss. See `tool_outputs`."""

from tests.router.tool_outputs import DALLAS, Case

GEMMA = [
    # the documentation of FunctionGemma, and the tests of vLLM's parser
    Case(
        "gemma",
        "Let me check. <start_function_call>call:get_weather{city:<escape>San Francisco, CA<escape>,"
        "unit:<escape>cel}sius<escape>}<end_function_call>",
        "Let me check. ",
        [("get_weather", '{"city": "San Francisco, CA", "unit": "cel}sius"}')],
    ),
    Case(
        "gemma",
        "<start_function_call>call:add{}<end_function_call><start_function_call>call:find-all.v2{days:15,ok:true,"
        "what:[<escape>a\n]<escape>,-1.5e3,null,[]],where:{lat:1,name:<escape>b<escape>}}<end_function_call>"
        "<start_function_response>",
        "",
        [
            ("add", "{}"),
            (
                "find-all.v2",
                '{"days": 15, "ok": true, "what": ["a\\n]", -1.5e3, null, []], "where": {"lat": 1, "name": "b"}}',
            ),
        ],
    ),
    # values have the types of the schema, though they are written as strings; a comma is missing
    Case(
        "gemma",
        "<start_function_call>call:get_weather{city:12345,days:<escape>3<escape>share:0.5,near:<escape>[1]<escape>,"
        "exact:yes,place:{x:y z}}",
        "",
        [
            (
                "get_weather",
                '{"city": "12345", "days": 3, "share": 0.5, "near": [1], "exact": "yes", "place": {"x": "y z"}}',
            )
        ],
    ),
    # Gemma 3: Google's prompts ask for a list or an object, the cookbook for a fence
    Case("gemma", "[get_weather(city='Paris'), add()]", "", [("get_weather", '{"city": "Paris"}'), ("add", "{}")]),
    Case("gemma", f'{{"name": "get_weather", "parameters": {DALLAS}}}', "", [("get_weather", DALLAS)]),
    Case("gemma", "```tool_code\nprint(get_weather(city='Paris'))\n```", "", [("get_weather", '{"city": "Paris"}')]),
    Case(
        "gemma",
        'Okay.\n```tool_code\nadd(a=1)\nprint(default_api.multiply(a=[2], b="(x)"))\n```\nDone.',
        "Okay.\n\nDone.",
        [("add", '{"a": 1}'), ("multiply", '{"a": [2], "b": "(x)"}')],
    ),
    Case(
        "gemma",
        '```json\n[\n  {"name": "add", "parameters": {"a": 1}},\n  {"name": "multiply", "arguments": {}}\n]\n```',
        "",
        [("add", '{"a": 1}'), ("multiply", "{}")],
    ),
    Case("gemma", '```json\n{"name": "add", "parameters": {}}\n```', "", [("add", "{}")]),
    # cut off, or broken within arguments
    Case(
        "gemma",
        "<start_function_call>call:get_weather{city:<escape>Par",
        "",
        [("get_weather", '{"city": "Par')],
    ),
    Case("gemma", "<start_function_call>call:add{a:1,:}<end", ":}<end", [("add", '{"a": 1')]),
    Case("gemma", "```tool_code\nadd(a=1)\nnope()\n```", "\nnope()\n```", [("add", '{"a": 1}')]),
    Case("gemma", "```tool_code\nprint(add(a=1), 2)\n```", ", 2)\n```", [("add", '{"a": 1}')]),
    *(
        Case("gemma", text, text, [])
        for text in (
            "<start_function_call>call:unknown{a:<escape>b<escape>}<end_function_call>",
            "<start_function_call>call:add(a=1)<end_function_call>",
            "<start_function_call>call:add{",
            '```json\n{"temperature": [3, {}]}\n```',
            "```tool_code\nprint(1 + 1)\n```",
            "```tool_code\nunknown(a=1)\n```",
            "```python\nadd(1)\n```",
            "[1, 2] {x}",
        )
    ),
]
GEMMA4 = [
    Case(
        "gemma4",
        'Let me check. <|tool_call>call:get_weather{city:<|"|>Paris, France<|"|>,days:42}<tool_call|><|tool_call>'
        'call:multiply{outer:{inner:{<|"|>3<|"|>:<|"|>new "text"<|"|>}},items:[<|"|>a]b<|"|>,true]}<tool_call|>'
        "<|tool_response>",
        "Let me check. ",
        [
            ("get_weather", '{"city": "Paris, France", "days": 42}'),
            ("multiply", '{"outer": {"inner": {"3": "new \\"text\\""}}, "items": ["a]b", true]}'),
        ],
    ),
    *(
        Case("gemma4", text, text, [])
        for text in ("<|tool_call>call:unknown{}<tool_call|>", "<|tool_call>", "[add(a=1)]")
    ),
]
TO_ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
GPT_OSS = [
    # as the guide to the format has it, and as the template writes it; `<|call|>` ends the answer
    Case("gpt_oss", f'<|start|>assistant{TO_ADD}{{"a": 1}}<|call|>', "", [("add", '{"a": 1}')]),
    Case("gpt_oss", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", [("add", '{"a": 1}')]),
    Case(
        "gpt_oss",
        f"I will.<|start|>assistant{TO_ADD}{{}}<|call|>"
        '<|start|>assistant to=multiply<|channel|>analysis<|message|>{"b": "<|end|>"}<|call|>\nDone.',
        "I will.\nDone.",
        [("add", "{}"), ("multiply", '{"b": "<|end|>"}')],
    ),
    # the tests of openai-harmony: no blank before the type; those of vLLM: no type, no arguments
    Case(
        "gpt_oss",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>"
        '{"latitude":48.8566,"longitude":2.3522}<|call|>',
        "",
        [("get_weather", '{"latitude":48.8566,"longitude":2.3522}')],
    ),
    Case("gpt_oss", '<|channel|>commentary to=functions.add<|message|>{\n"a": 1\n}', "", [("add", '{\n"a": 1\n}')]),
    Case("gpt_oss", "<|channel|>commentary to=functions.add <|constrain|>json<|message|><|call|>", "", [("add", "{}")]),
    Case("gpt_oss", f"{TO_ADD}", "", [("add", "{}")]),
    Case("gpt_oss", f'{TO_ADD}{{"a": "b', "", [("add", '{"a": "b')]),
    *(
        Case("gpt_oss", text, text, [])
        for text in (
            "Just text, to=functions.add",
            "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}<|call|>",
            "<|channel|>analysis to=browser.search code<|message|>{}<|call|>",
            f"{TO_ADD}no JSON<|call|>",
            "<|channel|>commentary to=functions.add",
            "<|channel|>final<|message|>to=functions.add",
            "<|start|>assistant<|channel|>final\nto=functions.add<|message|>{}",
            f"<|start|>{'x' * 300}<|message|>",
        )
    ),
]
CASES = [*GEMMA, *GEMMA4, *GPT_OSS]
