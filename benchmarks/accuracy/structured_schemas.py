"""The backends of structured outputs on many JSON schemas:
`python -m benchmarks.accuracy.structured_schemas --schemas FILE`.

FILE has one object a line, as in JSONSchemaBench and MaskBench: `schema`, and `tests`, a list of `{"valid": bool,
"data": ...}`. A schema counts as compiled if a process compiles it within a second, through the code that nodes run.
Each instance is then walked token by token, in the compact form of json.dumps and in its default form: a valid one
should be accepted whole, an invalid one refused. Before each token a mask is filled.
"""

from __future__ import annotations

import gzip
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from baton.settings import Settings, parse
from baton.structured_output import xgrammar_compiler
from benchmarks.accuracy.schema_worker import BACKENDS, Asked, Compiled, SchemaWorker, Walked
from benchmarks.harness.big_vocabulary import big_vocabulary
from benchmarks.harness.checks import WrongAnswers
from benchmarks.harness.tables import Table
from deploy.bench.stats import percentile

NOTE_EVERY = 250
CHECKED = Asked(
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    [(True, {"a": 12}), (False, {"a": "x"}), (False, {}), (False, {"a": 1, "b": 2})],
)
NOTHING_ALLOWED = Asked({"type": "frob"}, [])


class SchemaBenchSettings(Settings):
    """Compares the backends of structured outputs on a file of JSON schemas with instances."""

    prog: ClassVar[str] = "benchmarks.accuracy.structured_schemas"

    schemas: Path = Field(description="JSON lines, plain or .gz: a schema and its instances in each")
    num_schemas: int | None = Field(None, ge=1, description="how many of them, from the first on; unset: all")
    tokenizer: Path | None = Field(None, description="tokenizer.json with --vocab-size tokens; unset: one made up")
    vocab_size: int = Field(128_256, ge=1000, description="tokens of the vocabulary")
    time_limit: float = Field(1.0, gt=0, description="seconds that a schema may take to compile, as in the router")
    output: Path | None = Field(None, description="file for the measurements as JSON, besides the last line")


@dataclass(slots=True)
class Tally:
    """Of one backend."""

    num_schemas: int = 0
    num_instances: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # by validity
    compile_s: list[float] = field(default_factory=list)
    num_refused: int = 0  # by the compiler
    num_late: int = 0  # not compiled in time, or the process died
    num_lost: int = 0  # compiled, but its instances took too long
    walks: list[Walked] = field(default_factory=list)
    base_bytes: int = 0  # of the process that is ready
    peak_bytes: int = 0

    def add(self, asked: Asked, compiled: Compiled | None, walked: Walked | None) -> None:
        self.num_schemas += 1
        for valid, _ in asked.instances:
            self.num_instances[valid] += 1
        if compiled is None:
            self.num_late += 1
        elif compiled.error is not None:
            self.num_refused += 1
        else:
            self.compile_s.append(compiled.seconds)
            if walked is None:
                self.num_lost += 1
            else:
                self.walks.append(walked)
                self.peak_bytes = max(self.peak_bytes, walked.peak_bytes)

    def line(self) -> dict[str, Any]:
        masks = [second for walk in self.walks for second in walk.mask_s]
        valid, invalid = ([each for walk in self.walks for each in walk.accepted[kind]] for kind in (True, False))
        return {
            "schemas": self.num_schemas,
            "compiled": len(self.compile_s),
            "refused": self.num_refused,
            "late": self.num_late,
            "lost": self.num_lost,
            "valid": self.num_instances[True],
            "valid_walked": len(valid),
            "valid_accepted_compact": sum(compact for compact, _ in valid),
            "valid_accepted_spaced": sum(spaced for _, spaced in valid),
            "invalid": self.num_instances[False],
            "invalid_walked": len(invalid),
            "invalid_accepted": sum(compact or spaced for compact, spaced in invalid),
            "compile_ms": {name: round(percentile(self.compile_s, q) * 1e3, 2) for name, q in QUANTILES.items()},
            "masks": len(masks),
            "mask_us": {name: round(percentile(masks, q) * 1e6, 1) for name, q in QUANTILES.items()},
            "base_mib": round(self.base_bytes / 2**20),
            "peak_mib": round(self.peak_bytes / 2**20),
        }


QUANTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}


def main() -> None:
    settings = parse(SchemaBenchSettings)
    try:
        line = run(settings)
    except WrongAnswers as error:
        sys.stderr.write(f"{settings.prog}: {error}\n")
        sys.exit(1)
    text = json.dumps(line)
    if settings.output:
        settings.output.write_text(text + "\n")
    print(text, flush=True)


def run(settings: SchemaBenchSettings) -> dict[str, Any]:
    """Measure, print the table, and return the content of the JSON line. Raises WrongAnswers."""
    names = [name for name in BACKENDS if name == "guidance" or xgrammar_compiler.is_installed()]
    every = list(read(settings.schemas, settings.num_schemas))
    with tempfile.TemporaryDirectory(prefix="baton-vocabulary-") as folder:
        tokenizer = settings.tokenizer or Path(folder) / "tokenizer.json"
        if settings.tokenizer is None:
            tokenizer.write_bytes(big_vocabulary(settings.vocab_size))
        for name in names:
            check(SchemaWorker(name, tokenizer, settings.vocab_size, 60.0), name)
        lines = {name: measure(name, every, tokenizer, settings) for name in names}
    print(table(lines).plain())
    return {
        "benchmark": "structured_schemas",
        "python": platform.python_version(),
        "vocab_size": settings.vocab_size,
        "time_limit_s": settings.time_limit,
        "backends": lines,
    }


def read(path: Path, limit: int | None) -> Iterator[Asked]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines):
            if number == limit:
                return
            found = json.loads(line)
            yield Asked(found["schema"], [(test["valid"], test["data"]) for test in found["tests"]])


def check(worker: SchemaWorker, name: str) -> None:
    """Raises WrongAnswers unless a simple schema is right, and a wrong one refused."""
    try:
        compiled, walked = worker.ask(CHECKED)
        if compiled is None or walked is None:
            raise WrongAnswers(f"{name}: a simple schema was not compiled: {compiled}")
        if walked.accepted != {True: [(True, True)], False: [(False, False)] * 3}:
            raise WrongAnswers(f"{name}: a simple schema was not followed: {walked.accepted}")
        compiled, _ = worker.ask(NOTHING_ALLOWED)
        if compiled is None or compiled.error is None:
            raise WrongAnswers(f"{name}: compiled a schema with an unknown type")
    finally:
        worker.close()


def measure(name: str, every: list[Asked], tokenizer: Path, settings: SchemaBenchSettings) -> dict[str, Any]:
    tally = Tally()
    worker = SchemaWorker(name, tokenizer, settings.vocab_size, settings.time_limit)
    try:
        for asked in every:
            tally.add(asked, *worker.ask(asked))
            if tally.num_schemas % NOTE_EVERY == 0:
                sys.stderr.write(f"{name}: {tally.num_schemas} of {len(every)} schemas\n")
        tally.base_bytes = worker.base_bytes
    finally:
        worker.close()
    return tally.line()


def table(lines: dict[str, dict[str, Any]]) -> Table:
    """With a column for each backend."""
    rows = []
    for name, first in next(iter(lines.values())).items():
        for part in first if isinstance(first, dict) else [None]:
            values = [line[name] if part is None else line[name][part] for line in lines.values()]
            rows.append([name if part is None else f"{name} {part}", *map(str, values)])
    return Table(["", *lines], rows)


if __name__ == "__main__":
    main()
