"""Fields that are not supported are refused by name, unless their value changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from baton.errors import InvalidRequest
from router.http.anthropic.unsupported import IN_MESSAGES
from router.http.sglang import unsupported as sglang
from router.http.tokens.unsupported import IN_SAMPLING, IN_TOKENS
from router.http.unsupported import HARMLESS, NO_EFFECT, Harmless, OneOf, refuse_unsupported


@pytest.mark.parametrize(
    "rules",
    [HARMLESS, IN_MESSAGES, IN_TOKENS, IN_SAMPLING, sglang.IN_GENERATE, sglang.IN_SAMPLING],
    ids=["all", "messages", "tokens", "sampling", "sglang", "sglang_sampling"],
)
def test_a_value_that_would_matter_is_refused_and_null_is_not(rules: Mapping[str, Harmless]) -> None:
    for name in rules:
        with pytest.raises(InvalidRequest, match=f"`{name}` is not supported") as refused:
            refuse_unsupported({name: {"some": "value"}}, rules)
        assert refused.value.param == name
    refuse_unsupported(dict.fromkeys([*rules][:64]), rules)


def test_harmless_values_are_taken() -> None:
    for name, rule in HARMLESS.items():
        for value in rule.harmless if isinstance(rule, OneOf) else ([], {}, "", False) if rule([]) else ():
            refuse_unsupported({name: value})


@pytest.mark.parametrize(("name", "value"), [("num_beams", 1.0), ("modalities", ["text", "x"])])
def test_values_that_only_resemble_harmless_ones_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name):
        refuse_unsupported({name: value})


def test_what_has_no_effect_is_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    refuse_unsupported(dict.fromkeys(NO_EFFECT, "x"))
    assert caplog.text == ""
