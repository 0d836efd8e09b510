"""What custom tools take, as the string in JSON that has it."""

import json

import pytest

from baton.structured_output.constraint import StructuredKind, StructuredOutput
from router.text.custom_input import CustomInput
from tests.cpu_time import takes_less_than
from tests.router.matching import matches

QUOTED = 'start: "<" ESCAPED_STRING ">"\n%import common.ESCAPED_STRING'


@pytest.mark.parametrize(
    ("syntax", "definition", "good", "bad"),
    [
        ("regex", r'"[^"]*"', ['""', '"a\n\\é"'], ['"a"b"', '"a\\"b"']),
        ("regex", r"[^\\]+", ['"', "\n"], ["\\", "a\\"]),
        ("regex", r"[^]\"][^-\"]\[[^b]", ["aa[a", "-][a"], ["]a[a", '"a[a', "a-[a", 'a"[a', "aa[b"]),
        ("lark", QUOTED, [r'<"a\"b">', '<"">'], ['<"a"b">', '<"\\">']),
    ],
)
def test_a_string_in_json_matches_as_the_text_does(syntax, definition: str, good: list[str], bad: list[str]) -> None:
    schema = json.dumps(CustomInput.defined(syntax, definition).schema())
    for text in good + bad:
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        assert matches(StructuredOutput(StructuredKind.JSON, schema), arguments) is (text in good), text


@pytest.mark.parametrize("part", ["[", "[^", "[a[", "[\\"])
def test_classes_that_are_not_closed_take_no_time(part: str) -> None:
    with takes_less_than(1):
        CustomInput.defined("regex", part * 40_000)
