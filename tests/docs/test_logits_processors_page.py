"""The processor of docs/logits_processors.md is one: it can be copied as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = (Path(__file__).parents[2] / "docs" / "logits_processors.md").read_text()


def test_the_processor_changes_what_it_says() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program, "the page", "exec", dont_inherit=True), names)  # annotations are evaluated, as there
    boosted = names["Boost"]([1], by=2.5)([], torch.zeros(3))
    assert boosted.tolist() == [0.0, 2.5, 0.0]
