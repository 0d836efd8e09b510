"""EleutherAI's evaluation harness, which generates and which compares the likelihood of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from questions import MODEL

CHECKPOINT = Path(__file__).resolve().parents[2] / "engine" / "checkpoints" / "baton-tiny"
SUMS = [(28, 98), (17, 25), (40, 41), (3, 9), (55, 12)]
GENERATE = """
task: sums_generated
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list: [{name: bare, filter: [{function: remove_whitespace}, {function: take_first}]}]
"""
CHOOSE = """
task: sums_chosen
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    rows = []
    for i, (a, b) in enumerate(SUMS):
        choices = [str(a + b + off) for off in (-10, 0, 7)]
        choices[1], choices[i % 3] = choices[i % 3], choices[1]
        row = {"question": f"{a} + {b} =", "answer": str(a + b), "choices": choices, "right": i % 3}
        rows.append(json.dumps(row))
    data = tmp_path / "sums.json"
    data.write_text("\n".join(rows))
    for name, text in (("generated", GENERATE), ("chosen", CHOOSE)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FILE", str(data)))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_generation_and_likelihood(api: str, tasks: TaskManager) -> None:
    model: dict[str, Any] = {
        "model": MODEL,
        "base_url": f"{api}/completions",
        "tokenizer": str(CHECKPOINT),
        "num_concurrent": 2,
        "max_retries": 1,
        "tokenized_requests": True,
        "add_bos_token": True,
    }
    done: Any = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=model,
        tasks=["sums_generated", "sums_chosen"],
        task_manager=tasks,
        bootstrap_iters=0,
    )
    assert done["results"]["sums_generated"]["exact_match,bare"] == 1.0
    assert done["results"]["sums_chosen"]["acc,none"] == 1.0
