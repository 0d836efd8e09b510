"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`found` and `do` are a sentence each; `do` is empty if there is nothing to do."""

    check: str
    verdict: Verdict
    found: str
    do: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warning(check: str, found: str, do: str) -> Finding:
    return Finding(check, "warning", found, do)


def failure(check: str, found: str, do: str) -> Finding:
    return Finding(check, "failure", found, do)


def skipped(check: str, found: str, do: str = "") -> Finding:
    return Finding(check, "skipped", found, do)


def has_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.verdict == "failure" for finding in findings)
