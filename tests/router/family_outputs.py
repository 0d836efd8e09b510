"""More of what models write when they call tools, by families. See `tool_outputs`."""

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
    # likewise where the schema says them by reference
    Case(
        "gemma",
        "<start_function_call>call:search{where:{lat:<escape>1.5<escape>,zip:12345},page:<escape>2<escape>,order:[<escape>3"
        "<escape>],page:<escape>x<escape>}<end_function_call>",
        "",
        [("search", '{"where": {"lat": 1.5, "zip": "12345"}, "page": 2, "order": [3], "page": "x"}')],
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
    Case("gemma", "```tool_code\nprint(add(a=1))", "", [("add", '{"a": 1}')]),
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
    # no value behind a name, as the tests of vLLM have it; null is a word, not a string
    Case(
        "gemma4",
        "<|tool_call>call:get_weather{city:,days: ,note:null,hint:}<tool_call|>",
        "",
        [("get_weather", '{"city": "", "days": "", "note": null, "hint": ""}')],
    ),
    Case("gemma4", "<|tool_call>call:get_weather{city:null}<tool_call|>", "", [("get_weather", '{"city": null}')]),
    Case("gemma4", "<|tool_call>call:add{a:", "", [("add", '{"a": ')]),
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
TOKYO = '{"city": "Tokyo", "unit": "celsius"}'
DEEPSEEK = [
    Case(
        "deepseek_v3",
        "Let me check.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{TOKYO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me check.",
        [("get_weather", TOKYO), ("add", "{}")],
    ),
    Case(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Tokyo"\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("get_weather", '{"city": "Tokyo"\n')],
    ),
    *(
        Case("deepseek_v3", text, text, [])
        for text in (
            "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>unknown\n```json\n{}\n```<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n{}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        )
    ),
    Case(
        "deepseek_v31",
        'some prefix text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x":1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>multiply<｜tool▁sep｜>{"y":2}<｜tool▁call▁end｜><｜tool▁calls▁end｜> some suffix text',
        "some prefix text some suffix text",
        [("add", '{"x":1}'), ("multiply", '{"y":2}')],
    ),
    *(
        Case("deepseek_v31", text, text, [])
        for text in (
            "Let me look that up.<｜tool▁calls▁begin｜>get_weather",
            '<｜tool▁calls▁begin｜>add<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>',
            "<｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>add<｜tool▁sep｜>x",
        )
    ),
]
INVOKE = [
    Case(
        "minimax_m2",
        'Let me check. <minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Seattle</parameter>\n'
        '<parameter name="days">5</parameter>\n</invoke>\n'
        '<invoke name="add"><parameter name="x">1</parameter></invoke>\n</minimax:tool_call>',
        "Let me check. ",
        [("get_weather", '{"city": "Seattle", "days": 5}'), ("add", '{"x": "1"}')],
    ),
    Case(
        "minimax_m2",
        '<minimax:tool_call><invoke name="unknown"></invoke><invoke name="add"></invoke></minimax:tool_call>',
        '<minimax:tool_call><invoke name="unknown"></invoke>',
        [("add", "{}")],
    ),
    Case(
        "minimax_m2",
        '<minimax:tool_call><invoke name="add"><parameter name="code">if a < b:\n  x',
        "",
        [("add", '{"code": "if a < b:\\n  x"')],
    ),
    *(
        Case("minimax_m2", text, text, [])
        for text in ("<minimax:tool_call>\n", '<invoke name="add" x>', '<invoke name="add"><parameter name="a>')
    ),
    Case(
        "deepseek_v32",
        'Sure!<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">SF</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">42</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">[1, {"k": "v"}]</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="true">1</｜DSML｜parameter></｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Sure!",
        [("get_weather", '{"city": "SF", "days": 42}'), ("add", '{"a": [1, {"k": "v"}], "b": "1"}')],
    ),
    # DeepSeek's encoding: a string is the text as it is
    Case(
        "deepseek_v32",
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">\na\n\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="x" string="true">null</｜DSML｜parameter>'
        '<｜DSML｜parameter name="y" string="true"></｜DSML｜parameter>'
        '<｜DSML｜parameter name="z" string="false">null</｜DSML｜parameter>'
        '<｜DSML｜parameter name="days" string="true">2</｜DSML｜parameter></｜DSML｜invoke>',
        "",
        [("get_weather", '{"city": "\\na\\n\\n", "x": "null", "y": "", "z": null, "days": 2}')],
    ),
    *(
        Case("deepseek_v32", text, text, [])
        for text in (
            '<｜DSML｜invoke name="unknown">\n</｜DSML｜invoke>',
            '<｜DSML｜invoke name="add"><｜DSML｜parameter name="a" string="maybe">',
        )
    ),
]
LISTS = [
    Case(
        "granite",
        '<|tool_call|> [\n  {"name": "get_weather", "arguments": {"city": "Tokyo"}},\n'
        '  {"arguments": {"a": 1}, "name": "add"}\n]\nI\'ll get that.',
        "\nI'll get that.",
        [("get_weather", '{"city": "Tokyo"}'), ("add", '{"a": 1}')],
    ),
    Case("granite", '<tool_call>[{"name": "add", "arguments": {}}]', "", [("add", "{}")]),
    Case(
        "granite",
        '<|tool_call|> {"name": "add", "arguments": {}}',
        '<|tool_call|> {"name": "add", "arguments": {}}',
        [],
    ),
    Case(
        "phi4_mini_json",
        'Let me check.\nfunctools[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]\nMore?',
        "Let me check.\n\nMore?",
        [("get_weather", '{"city": "Tokyo"}')],
    ),
    *(
        Case("phi4_mini_json", text, text, [])
        for text in ("import functools", "functools[] This is text", 'functools[{"name": "unknown", "arguments": {}}]')
    ),
    Case(
        "internlm",
        'Look: <|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Tokyo"}}<|action_end|>',
        "Look: ",
        [("get_weather", '{"city": "Tokyo"}')],
    ),
    *(
        Case("internlm", text, text, [])
        for text in (
            "<|action_start|><|interpreter|>1 + 1<|action_end|>",
            "<|action_start|><|plugin|>not json<|action_end|>",
        )
    ),
]
OLMO3 = [
    Case(
        "olmo3",
        "<function_calls>get_weather(city='San Francisco', metric='celsius')\nadd(role=null, ok=true)</function_calls>",
        "",
        [("get_weather", '{"city": "San Francisco", "metric": "celsius"}'), ("add", '{"role": null, "ok": true}')],
    ),
    Case(
        "olmo3",
        "<function_calls>add()\nadd(x=b'z')</function_calls>",
        "\nadd(x=b'z')</function_calls>",
        [("add", "{}")],
    ),
    *(Case("olmo3", text, text, []) for text in ("<function_calls>unknown()</function_calls>", "[add()]")),
]
CASES = [*GEMMA, *GEMMA4, *GPT_OSS, *DEEPSEEK, *INVOKE, *LISTS, *OLMO3]
