"""docs/flags.md has every flag of the commands that serve."""

from __future__ import annotations

import re

from baton.settings import help_text
from deploy.bench.settings import BenchSettings
from router.settings import RouterSettings
from tools.flags_page import PATH, render


def test_the_page_is_what_the_commands_take() -> None:
    assert PATH.read_text() == render(), "run: python -m tools.flags_page"


def test_it_has_the_flags_of_each_command() -> None:
    _, nodes, router, up, _ = render().split("\n## ")
    told = [set(re.findall(r"^\| `--([a-z0-9-]+)` ", section, re.MULTILINE)) for section in (nodes, router, up)]
    assert [name in told[0] for name in ("max-num-seqs", "prefill", "http")] == [True, False, False]
    assert [name in told[1] for name in ("max-num-seqs", "prefill", "http")] == [False, True, True]
    assert [name in told[2] for name in ("max-num-seqs", "prefill", "http")] == [False, True, True]


def test_a_default_is_written_as_a_flag_takes_it() -> None:
    assert help_text(RouterSettings.model_fields["allowed_methods"]).endswith("(default: *)")
    assert help_text(BenchSettings.model_fields["seeds"]).endswith("(default: 1,2,3)")
