"""Lark grammars as regular expressions: these match the texts of the grammar, or there is a reason for having none."""

import re

import pytest

from baton.errors import InvalidRequest
from baton.structured_output.constraint import StructuredKind, StructuredOutput
from router.text.lark_regex import lark_regex
from tests.cpu_time import takes_less_than
from tests.router.matching import matches

APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""That of Codex's tool."""
PATCH = '*** Begin Patch\n*** Update File: a.py\n@@ f\n-print("a\\n")\n+\tprint("ü")\n*** End Patch\n'

GRAMMARS = {
    APPLY_PATCH: ([PATCH, PATCH[:-1]], [PATCH[1:], PATCH.replace("@@ f\n-", ""), PATCH.replace("+\t", "*\t")]),
    'start: ["a"] b // all of it\n?b: "b" -> one\n  | c+  # or these\nc: "é"': (["b", "ab", "aéé"], ["a", "bé", "éa"]),
    'start: (a|)\na: "x" | "y" "0"?': (["", "x", "y0"], ["x0", "xx"]),
    'start: "a.b" | "(" | "\\x41\\u0042\\"\\\\n"': (["a.b", "(", 'AB"\\n'], ["axb", "A"]),
    'start: "q"i | /r/i | /s.t/s | /u.v/': (["q", "Q", "R", "s\nt", "u-v"], ["u\nv"]),
    'start: "a"~2 | "b"~1..2 | "c"{3} | "d"{1,2}': (["aa", "b", "bb", "ccc", "dd"], ["a", "bbb", "cc", "ddd"]),
    'start: "a"{,2} "b"': (["b", "aab"], ["aaab"]),
    'start: "\\\\x41"': ([r"\x41"], [r"\u0041", "A", r"\A"]),
    r"start: /^a$/ /[$^]|b$/": (["a$", "a^", "ab"], ["a", "^a$b"]),
    "start: a a\na: /(?P<x>[b(?P<x>]+),/": (["b,(?P<x>,"], ["b,"]),
    r"start: /a\/b|[\/\"]+/": (["a/b", '/"'], ["a", "b"]),
    'start: A (" " B)*\nA: /[a-c]+/\nB: A "!"': (["ab", "a b! c!"], ["ab c", "a b!c!"]),
    "start: WORD _W N+\n%import common (WORD, DIGIT)\n%import common.WS_INLINE -> _W\nN: DIGIT": (["ab \t12"], ["ab1"]),
}


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_it_matches_what_the_grammar_does(grammar: str) -> None:
    good, bad = GRAMMARS[grammar]
    as_grammar = StructuredOutput(StructuredKind.GRAMMAR, grammar)
    as_regex = StructuredOutput(StructuredKind.REGEX, lark_regex(grammar))
    for text in good:
        assert matches(as_grammar, text), text
        assert matches(as_regex, text), text
    for text in bad:
        assert not matches(as_grammar, text), text
        assert not matches(as_regex, text), text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"', "`start` leads back to itself, or is 64 rules deep"),
        ('start: a\na: b\nb: "x" a?', "leads back to itself"),
        ("start: a", "`a` is not defined"),
        ('a: "a"', "`start` is not defined"),
        ("start: WS\n%import python.WS", "`%import` is in it"),
        ("start: NONE\n%import common.NONE", "`NONE` is not defined"),
        ('start: A B\nA: "a"\nB: "b"\n%ignore /[ ]+/', "`%ignore` is in it"),
        ('start: %json {"type": "object"}', "`%json` is in it"),
        ("start: <|im_end|>", "`<|im_end|>` is in it"),
        ('start: A\nA: /a+/ & ~"aa"', "`&` is in it"),
        ('start: "a".."z"', "is in it"),
        ('start: "a', "is in it"),
        ('start: "\\q"', "cannot be read"),
        ("start: /a/l", "is in it"),
        ("start: /a # b/x", "the flag `x` is in it"),
    ],
)
def test_there_is_a_reason_where_there_is_none(grammar: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(why)):
        lark_regex(grammar)


def test_it_stays_short_and_quick() -> None:
    """Each rule doubles the one before it."""
    rules = "\n".join(f"a{i}: a{i - 1} a{i - 1}" for i in range(1, 60))
    with takes_less_than(1):
        with pytest.raises(InvalidRequest, match="more than 32768 characters"):
            lark_regex(f'start: a59\na0: "abcdefgh"\n{rules}')
        with pytest.raises(InvalidRequest, match="more than 32768 characters"):
            lark_regex(f"start: {'a ' * 100_000}\na: /{'x' * 60_000}/")
        with pytest.raises(InvalidRequest, match="more than 32768 characters"):
            lark_regex(f"start: {'?' * 100_000}")
