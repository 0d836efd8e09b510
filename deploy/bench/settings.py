"""Settings of `baton bench`. Names are those of vLLM's `vllm bench serve` where it has them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from baton.settings import Settings, Sizes
from deploy.bench.arrivals import Arrival
from deploy.server_url import check_server_url

Workload = Literal["random", "shared-prefix", "multi-turn", "trace"]


class BenchSettings(Settings):
    """Measure a server with OpenAI's API under load: latencies, rates, and the highest rate within limits.

    Exits with 0, with 1 if a request failed, and with 2 for bad settings.
    """

    prog: ClassVar[str] = "baton bench"

    url: str = Field("http://127.0.0.1:8000", description="the server, with or without /v1 at the end")
    api_key: SecretStr | None = Field(None, description="sent as a bearer token; better in the environment than here")
    model: str | None = Field(None, description="model to ask for; unset: the first that the server lists")
    endpoint: Literal["completions", "chat"] = Field("completions", description="API to call, streamed")
    workload: Workload = Field("random", description="what is asked")
    trace_file: Path | None = Field(None, description="requests of --workload trace, in Mooncake's format")
    input_len: int = Field(512, ge=1, description="mean words of a prompt beyond what it shares, about a token each")
    output_len: int = Field(128, ge=1, description="mean tokens of an answer at most")
    prefix_len: int = Field(2048, ge=512, description="words of a shared prefix, rounded down to a multiple of 512")
    num_prefixes: int = Field(16, ge=1, description="shared prefixes, the n-th used 1/n as often as the first")
    num_turns: int = Field(4, ge=1, description="turns of a conversation")
    think_time: float = Field(
        2.0, gt=0, allow_inf_nan=False, description="mean seconds from one turn of a conversation to the next"
    )
    num_prompts: int = Field(100, ge=1, description="requests for each seed; of a trace, its first ones")
    request_rate: float | None = Field(
        None, gt=0, description="mean requests a second; unset: 1, and of a trace its own times"
    )
    arrival: Arrival = Field("poisson", description="when requests are sent")
    burst_size: int = Field(8, ge=1, description="requests at once, with --arrival burst")
    seeds: Sizes = Field((1, 2, 3), description="a run for each")
    num_warmups: int = Field(3, ge=0, description="requests before the first run, one after another, not counted")
    request_timeout: float = Field(600.0, gt=0, description="seconds until a request without a whole answer has failed")
    ignore_eos: bool = Field(False, description="ask for answers of full length; OpenAI's own API has no such field")
    goodput_ttft: float | None = Field(None, gt=0, description="limit of TTFT in seconds; begins a search for goodput")
    goodput_itl: float | None = Field(
        None, gt=0, description="limit of a request's mean ITL in seconds; begins a search for goodput"
    )
    goodput_share: float = Field(0.9, gt=0, le=1, description="share of requests that must be within both limits")
    goodput_min_rate: float = Field(0.125, gt=0, description="lowest rate to try, in requests a second")
    goodput_max_rate: float = Field(64.0, gt=0, description="highest rate to try, in requests a second")
    goodput_steps: int = Field(6, ge=1, le=20, description="rates to try between the two")
    result_file: Path | None = Field(None, description="where to write settings, environment and figures as JSON")
    html_file: Path | None = Field(None, description="where to write a page with plots")
    png_file: Path | None = Field(None, description="where to write the plots as a picture; needs the extra plots")
    allow_failures: bool = Field(False, description="exit with 0 although requests failed")
    progress: bool = Field(True, description="show a progress bar, on a terminal")

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        return check_server_url(url)

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, key: SecretStr | None) -> SecretStr | None:
        if key and not (key.get_secret_value().isascii() and key.get_secret_value().isprintable()):
            raise ValueError("must be printable ASCII characters, in one line")
        return key

    @field_validator("seeds")
    @classmethod
    def _has_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError("must be one or more different numbers")
        return seeds

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.workload == "trace") != (self.trace_file is not None):
            raise ValueError("--trace-file: needed with --workload trace, and only there")
        if self.workload == "multi-turn" and self.arrival != "poisson":
            raise ValueError("--arrival: conversations of --workload multi-turn arrive as poisson")
        if self.workload == "trace" and self.arrival != "poisson" and self.request_rate is None and not self.searches:
            raise ValueError("--arrival: a trace has times of its own, unless there is a --request-rate")
        if (self.goodput_ttft is None) != (self.goodput_itl is None):
            raise ValueError("--goodput-ttft, --goodput-itl: one needs the other")
        if self.searches and self.request_rate is not None:
            raise ValueError("--request-rate: the search for goodput tries rates of its own")
        if self.goodput_min_rate >= self.goodput_max_rate:
            raise ValueError("--goodput-min-rate: must be below --goodput-max-rate")
        return self

    @property
    def searches(self) -> bool:
        return self.goodput_ttft is not None
