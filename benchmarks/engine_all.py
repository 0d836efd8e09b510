"""Decode, prompts and throughput with one model, built once: `python -m benchmarks.engine_all`."""

from __future__ import annotations

from typing import ClassVar

from benchmarks import engine_decode, engine_prefill, engine_throughput
from benchmarks.engine_decode import DecodeBenchSettings
from benchmarks.engine_prefill import PrefillBenchSettings
from benchmarks.engine_report import Section, main
from benchmarks.engine_throughput import ThroughputBenchSettings


class AllBenchSettings(DecodeBenchSettings, PrefillBenchSettings, ThroughputBenchSettings):
    """Measures all there is to measure of an engine, in this process."""

    prog: ClassVar[str] = "benchmarks.engine_all"


SECTIONS: dict[str, Section] = {
    # Decode first: it fills the pool with random KV, which no prompt of the other sections matches.
    "decode": engine_decode.measure,
    "prefill": engine_prefill.measure,
    "throughput": engine_throughput.measure,
    "prefill_even": engine_prefill.measure_even,
    "decode_even": engine_decode.measure_even,
}

if __name__ == "__main__":
    main(AllBenchSettings, SECTIONS)
