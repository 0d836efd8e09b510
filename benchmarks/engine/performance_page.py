"""Generates the measured parts of docs/performance.md and its plots: `python -m benchmarks.engine.performance_page`.

`docs/performance/NAME.json` is the JSON line of a run of `benchmarks.engine.all`; NAME is the model's common name. The
text between `<!-- measured: PART -->` and `<!-- end -->` on the page is regenerated from all of these files, as is
NAME.svg next to each. A test checks that the page is up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine.performance_plot import Line, plot
from benchmarks.engine.tables import decode_table, host_table, prefill_table, throughput_table
from benchmarks.engine.trace import GAP_US
from benchmarks.harness.tables import Table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "docs" / "performance"
PART = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOTHING = "Not measured yet."
BATON, VLLM, FLOOR = "#3b82f6", "#d97706", "#7d8590"

Measured = Mapping[str, Any]
Results = Mapping[str, Measured]
"""The JSON lines of the runs, by name of the model."""


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def write_page(page: str, results: Results) -> str:
    """The page with its measured parts regenerated. Raises KeyError for an unknown part."""
    return PART.sub(lambda found: f"{found[1]}{PARTS[found[2]](results) or NOTHING}\n{found[3]}", page)


def plots(results: Results) -> dict[str, str]:
    """Contents of the plots by file name."""
    return {f"{name}.svg": _plot(name, result) for name, result in results.items() if "decode" in result}


def _plot(name: str, result: Measured) -> str:
    """A plot of the greedy cells with the shortest context."""
    greedy = [cell for cell in result["decode"]["cells"] if cell["sampling"] == "greedy"]
    context = min(cell["context"] for cell in greedy)
    cells = sorted((cell for cell in greedy if cell["context"] == context), key=lambda cell: int(cell["batch"]))
    lines = [Line("baton", [cell["mean_ms"] for cell in cells], BATON)]
    if all(cell["vllm_ms"] for cell in cells):
        lines.append(Line("vLLM", [cell["vllm_ms"] for cell in cells], VLLM))
    lines.append(Line("floor", [cell["floor_ms"] for cell in cells], FLOOR, dashed=True))
    title = f"{name}: decode on {result['machine']['device']}, context from {context}"
    return plot(title, "batch", "ms per step", [str(cell["batch"]) for cell in cells], lines)


# ---- the parts: Markdown, empty if there are no results ----


def _machine(results: Results) -> str:
    return "\n\n".join(f"**{name}**: {_run_of(result)}" for name, result in results.items())


def _run_of(result: Measured) -> str:
    machine, ceilings = result["machine"], result["ceilings"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("baton", "torch", "triton", "transformers", "python"))
    weights = "random weights" if result["load_format"] == "dummy" else "its own weights"
    read, copied = (ceilings[f"{way}_bytes_per_s"] / 1e12 for way in ("read", "copy"))
    return (
        f"{machine['date']}, {machine['device']}, {result['dtype']}, {weights}. {versions}. In the same run: memory "
        f"read at {read:.2f} TB/s and copied at {copied:.2f} TB/s, {ceilings['matmul_dtype']} matmuls at "
        f"{ceilings['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s, "
        f"{ceilings['sustained_matmul_flops_per_s'] / 1e12:.0f} when they follow one another. "
        f"The engine was built in {result['build_s']:.1f} s.\n\n"
        f"```\n{result['command']}\n```"
    )


def _compared(results: Results) -> str:
    versions = {result["compared_with"] for result in results.values()} - {None}
    return "\n".join(f"vLLM's figures are those of {text}." for text in sorted(versions))


def _checked(results: Results) -> str:
    return "\n".join(f"- {name}: {_agreement(result['checked'])}" for name, result in results.items())


def _agreement(checked: Measured) -> str:
    return (
        f"{checked['num_compared_tokens']:.0f} greedy tokens, of {checked['num_sequences']:.0f} requests at once: "
        f"{checked['agreement']:.0%} are the reference's argmax, none is more than {checked['max_shortfall']:.2f} "
        f"standard deviations of the logits below it; logprobs are within {checked['max_logprob_error']:.2f}"
    )


def _tables(section: str, table: Callable[[Measured], Table]) -> Callable[[Results], str]:
    """A table for each model that has the section."""

    def part(results: Results) -> str:
        sections = {name: result[section] for name, result in results.items() if result.get(section)}
        return "\n\n".join(f"**{name}**\n\n{table(measured).markdown()}" for name, measured in sections.items())

    return part


def _pictures(results: Results) -> str:
    return "\n\n".join(f"![Decode ms per step over batch sizes](performance/{file})" for file in plots(results))


def _trace(results: Results) -> str:
    traces = {name: result["decode"].get("trace") for name, result in results.items() if "decode" in result}
    return "\n".join(f"- {name}: {_idle(trace)}" for name, trace in traces.items() if trace)


def _idle(trace: Measured) -> str:
    return (
        f"{trace['num_kernels']:.0f} kernels and copies take {trace['span_us']:.0f} us. The GPU is idle for "
        f"{trace['idle_us']:.0f} us of them, for {trace['gaps_us']:.0f} us in pauses of more than {GAP_US:g} us, "
        f"of which the longest was {trace['largest_gap_us']:.1f} us"
    )


PARTS: dict[str, Callable[[Results], str]] = {
    "machine": _machine,
    "compared": _compared,
    "checked": _checked,
    "pictures": _pictures,
    "decode": _tables("decode", decode_table),
    "host": _tables("decode", host_table),
    "trace": _trace,
    "prefill": _tables("prefill", prefill_table),
    "prefill_even": _tables("prefill_even", prefill_table),
    "throughput": _tables("throughput", throughput_table),
}


def main() -> None:
    results = read_results()
    PAGE.write_text(write_page(PAGE.read_text(), results))
    for file, picture in plots(results).items():
        (RESULTS / file).write_text(picture)
    print(f"{PAGE.relative_to(ROOT)}: {', '.join(results) or 'nothing measured'}")


if __name__ == "__main__":
    main()
