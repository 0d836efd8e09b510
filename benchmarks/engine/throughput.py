"""Total tokens/s of many concurrent requests, prompts and answers: `python -m benchmarks.engine.throughput`."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pydantic import Field

from baton.sampling import SamplingParams
from benchmarks.engine.bench import Bench, EngineBenchSettings, drain, note
from benchmarks.engine.report import main
from benchmarks.engine.tables import throughput_table

QUICK = (6, 20, 5)
VLLM_LOAD = (512, 512, 128)
WARM_REQUESTS = 64
WARM_TOKENS = 8


class ThroughputBenchSettings(EngineBenchSettings):
    """Measures the engine under more requests than it runs one by one, in this process."""

    prog: ClassVar[str] = "benchmarks.engine.throughput"

    num_requests: int = Field(VLLM_LOAD[0], ge=1, description="requests that come at once")
    input_len: int = Field(VLLM_LOAD[1], ge=1, description="tokens of each prompt")
    output_len: int = Field(VLLM_LOAD[2], ge=1, description="tokens of each answer")


def measure(bench: Bench) -> dict[str, Any]:
    """The section of the report."""
    settings = bench.settings
    assert isinstance(settings, ThroughputBenchSettings)
    load = QUICK if settings.quick else (settings.num_requests, settings.input_len, settings.output_len)
    num_requests, input_len, output_len = load
    note(f"throughput, {num_requests} requests of {input_len} in and {output_len} out")
    _load(bench, min(num_requests, WARM_REQUESTS), input_len, min(output_len, WARM_TOKENS))
    seconds, num_steps = _load(bench, num_requests, input_len, output_len)
    vllm = bench.shape.vllm if load == VLLM_LOAD else None
    section = {
        "num_requests": num_requests,
        "input_len": input_len,
        "output_len": output_len,
        "max_num_seqs": bench.engine.config.max_num_seqs,
        "max_num_batched_tokens": bench.engine.config.max_num_batched_tokens,
        "duration_s": round(seconds, 3),
        "num_steps": num_steps,
        "total_tokens_per_s": round(num_requests * (input_len + output_len) / seconds, 1),
        "output_tokens_per_s": round(num_requests * output_len / seconds, 1),
        "vllm_total_tokens_per_s": vllm.offline_tokens_per_s if vllm else None,
    }
    print(throughput_table(section).plain())
    return section


def _load(bench: Bench, num_requests: int, input_len: int, output_len: int) -> tuple[float, int]:
    """Seconds and steps for all requests."""
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    sequences = [bench.sequence(bench.prompt(input_len), sampling) for _ in range(num_requests)]
    num_steps = num_sampled = 0
    began = time.perf_counter()
    for seq in sequences:
        bench.engine.add(seq)
    for result in drain(bench.engine):
        num_steps += 1
        num_sampled += len(result.sampled)
    seconds = time.perf_counter() - began
    assert num_sampled == num_requests * output_len, "an answer is too short"
    return seconds, num_steps


if __name__ == "__main__":
    main(ThroughputBenchSettings, {"throughput": measure})
