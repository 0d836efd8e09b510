"""Tool parsers: what models write becomes calls, whatever the pieces in which it comes, and nothing is lost."""

import time
from collections.abc import Iterable
from types import SimpleNamespace

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import plugins
from router.plugins import UnknownPlugin
from router.tool_parsers import TOOL_PARSERS, CallArguments, CallStart, Content, Part, Piece, find_tool_parser, merge
from tests.router import family_outputs, tool_outputs
from tests.router.tool_outputs import TOOLS, Case

CASES = [*tool_outputs.CASES, *family_outputs.CASES]


def parse(name: str, text: str, cuts: Iterable[int] = ()) -> tuple[str, list[tuple[str, str]]]:
    """Content, and names and arguments of the calls."""
    return joined(pieces_of(name, text, cuts))


def pieces_of(name: str, text: str, cuts: Iterable[int] = ()) -> list[Piece]:
    parser = TOOL_PARSERS[name](TOOLS)
    pieces: list[Piece] = []
    start = 0
    for cut in [*cuts, len(text)]:
        pieces += parser.feed(text[start:cut])
        start = cut
    return pieces + parser.finish()


def joined(pieces: Iterable[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Arguments must begin like JSON, even where they break off: clients parse them as they come."""
    content = ""
    calls: list[list[str]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case CallStart(index, call_id, name):
                assert (index, bool(call_id)) == (len(calls), True)
                calls.append([name, ""])
            case CallArguments(index, text):
                calls[index][1] += text
    for _, arguments in calls:
        pydantic_core.from_json(arguments, allow_partial=True)
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parser}: {case.text[:40]!r}")
def test_what_models_write_is_read_wherever_it_is_cut(case: Case):
    expected = (case.content, case.calls)
    assert parse(case.parser, case.text) == expected
    assert parse(case.parser, case.text, range(1, len(case.text))) == expected
    if len(case.text) < 1000:
        for cut in range(1, len(case.text)):
            assert parse(case.parser, case.text, [cut]) == expected, cut


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_text_in_any_pieces_reads_like_the_whole(data):
    """Texts are made of parts of those that models write, so that calls begin, break off and begin again."""
    name = data.draw(st.sampled_from(sorted(TOOL_PARSERS)))
    texts = [case.text for case in CASES if case.parser == name and len(case.text) < 1000]
    parts = st.tuples(st.sampled_from(texts), st.integers(0, 60), st.integers(1, 60))
    text = "".join(whole[start : start + size] for whole, start, size in data.draw(st.lists(parts, max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    content, calls = parse(name, text)
    assert parse(name, text, cuts) == (content, calls)
    if not calls:
        assert content == text


def test_arguments_go_out_as_they_come():
    pieces = pieces_of("hermes", '<tool_call>{"name": "add", "arguments": {"a": "bcd"}}', range(1, 60))
    assert pieces[0] == CallStart(0, pieces[0].id, "add")
    assert [piece.text for piece in pieces[1:]] == ['{"a":', " ", '"', "b", "c", "d", '"', "}"]


def test_long_strings_of_markup_go_out_as_they_come():
    parser = TOOL_PARSERS["qwen3_coder"](TOOLS)
    parser.feed("<function=add><parameter=code>\n1234567")
    assert parser.feed("89\n") == [CallArguments(0, "89")]
    assert parser.feed("0") == [CallArguments(0, "\\n0")]


def test_content_waits_only_while_it_may_become_a_call():
    parser = TOOL_PARSERS["hermes"](TOOLS)
    assert parser.feed("a <tool") == [Content("a ")]
    assert parser.feed(" b") == [Content("<tool b")]
    parser = TOOL_PARSERS["llama3_json"](TOOLS)
    assert merge(parser.feed('{"temperature": 3')) == [Content('{"temperature": 3')]


def test_ids_are_of_the_form_that_the_models_templates_take():
    text = '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{}'
    first, second = (piece.id for piece in pieces_of("mistral", text) if isinstance(piece, CallStart))
    assert (len(first), first.isalnum(), second) == (9, True, "VvvODy9mT")
    text = "<|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert pieces_of("kimi_k2", text)[0] == CallStart(0, "functions.add:3", "add")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "' + "<tool_call>" * 5000),
        ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 10_000),
        ("llama3_json", "{" * 20_000),
        ("pythonic", "[add(" * 10_000),
        ("pythonic", "[add(a='" + "[" * 50_000),
        ("qwen3_coder", "<function=add><parameter=s>" + "y\n" * 20_000),
        ("mistral", " " * 50_000),
        ("gemma", "<start_function_call>call:add{a:<escape>" + "<esc" * 10_000),
        ("gemma", "<start_function_call>call:add{a:" + "{a:" * 5000),
        ("gemma", "```tool_code\nadd(a=1)\n" * 1000),
        ("gpt_oss", "<|start|>assistant<|channel|>a to=add " * 1500),
    ],
)
def test_the_cost_is_linear(name, text):
    """Ten times the text may not cost a hundred times as much: it is compared with what a hostile text costs alone."""

    def cost(length: int) -> float:
        began = time.process_time()
        pieces_of(name, text[:length], range(4, length, 4))
        return time.process_time() - began

    short = min(cost(len(text) // 10) for _ in range(3))
    assert any(cost(len(text)) < 35 * short + 0.05 for _ in range(3))


# ---- the registry ----


def entry(name: str, found: object) -> SimpleNamespace:
    def load() -> object:
        if isinstance(found, Exception):
            raise found
        return found

    return SimpleNamespace(name=name, value=f"their.module:{name}", load=load)


def test_other_packages_may_add_parsers(monkeypatch):
    theirs = type("Theirs", (TOOL_PARSERS["hermes"],), {})
    offered = [
        entry("theirs", theirs),
        entry("hermes", theirs),
        entry("wrong", dict),
        entry("bad", ImportError("no x")),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: offered if group == "baton.tool_parsers" else [])
    assert find_tool_parser("theirs") is theirs
    assert find_tool_parser("hermes") is TOOL_PARSERS["hermes"]
    with pytest.raises(UnknownPlugin, match="no subclass of ToolParser"):
        find_tool_parser("wrong")
    with pytest.raises(UnknownPlugin, match="bad cannot be loaded: ImportError: no x"):
        find_tool_parser("bad")
    with pytest.raises(UnknownPlugin, match="none called 'herms'; there are bad, "):
        find_tool_parser("herms")
