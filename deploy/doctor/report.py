"""Findings as a table, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import baton
from deploy.doctor.finding import Finding, Verdict, has_failed

STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}


def print_table(findings: Sequence[Finding], console: Console) -> None:
    table = Table(box=None, padding=(0, 1), show_edge=False)
    for title in ("check", "", "found"):
        table.add_column(title, overflow="fold", vertical="top")
    for finding in findings:
        found = Text(finding.found)
        if finding.do:
            found.append(f"\n-> {finding.do}", style=STYLES[finding.verdict])
        table.add_row(finding.check, Text(finding.verdict, style=STYLES[finding.verdict]), found)
    console.print(table)
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in STYLES}
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)


def as_json(findings: Sequence[Finding]) -> str:
    stated: dict[str, Any] = {
        "version": baton.__version__,
        "host": platform.node(),
        "failed": has_failed(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    return json.dumps(stated, indent=2)
