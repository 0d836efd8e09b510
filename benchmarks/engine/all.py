"""Decode, prompts and throughput with one model, built once: `python -m benchmarks.engine.all`."""

from __future__ import annotations

from typing import ClassVar

from benchmarks.engine import decode, prefill, throughput
from benchmarks.engine.decode import DecodeBenchSettings
from benchmarks.engine.prefill import PrefillBenchSettings
from benchmarks.engine.report import Section, main
from benchmarks.engine.throughput import ThroughputBenchSettings


class AllBenchSettings(DecodeBenchSettings, PrefillBenchSettings, ThroughputBenchSettings):
    """Measures all there is to measure of an engine, in this process."""

    prog: ClassVar[str] = "benchmarks.engine.all"


SECTIONS: dict[str, Section] = {
    # Decode first: it fills the pool with random KV, which no prompt of the other sections matches.
    "decode": decode.measure,
    "prefill": prefill.measure,
    "throughput": throughput.measure,
    "prefill_even": prefill.measure_even,
    "decode_even": decode.measure_even,
}

if __name__ == "__main__":
    main(AllBenchSettings, SECTIONS)
