"""The API is what the router's OpenAPI document says, in requests that fit it and in requests that do not."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.served import BODIES, CASE_S, answers_as_ever, no_mistakes, serving

schemathesis = pytest.importorskip("schemathesis", reason="machines with a GPU have no need of it")
openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")

NUM_EXAMPLES, NUM_FULL = 3, 30
"""Of each operation, that fit and that do not."""
CHECKS = [
    schemathesis.checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.response_schema_conformance,
]
BOUNDED = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # what fails is told as it is: shrinking over sockets takes minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_examples", [NUM_EXAMPLES, pytest.param(NUM_FULL, marks=pytest.mark.full)])
async def test_the_api_is_as_it_says(num_examples: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as router, httpx.AsyncClient(base_url=router.http, timeout=CASE_S) as client:
        spec = (await client.get("/openapi.json")).json()
        assert {*BODIES, "/v1/models", "/ready"} <= set(spec["paths"])
        await asyncio.to_thread(_exercise, spec, router.http, num_examples)
        await answers_as_ever(client)
        await router.idle()
    no_mistakes(caplog)


def _exercise(spec: dict[str, Any], url: str, num_examples: int) -> None:
    """Every operation, on a thread beside the router's loop."""
    for found in schemathesis.openapi.from_dict(spec).get_all_operations():
        operation = found.ok()
        _run(operation, schemathesis.GenerationMode.POSITIVE, url, num_examples)
        if _may_not_fit(spec["paths"][operation.path][operation.method]):
            _run(operation, schemathesis.GenerationMode.NEGATIVE, url, num_examples)


def _may_not_fit(described: dict[str, Any]) -> bool:
    """Whether there are requests that do not. Any string fits in a path: hypothesis would find that out by trying 459
    times."""
    taken = [(parameter["in"], parameter["schema"].get("type")) for parameter in described.get("parameters", ())]
    return "requestBody" in described or any(each != ("path", "string") for each in taken)


def _run(operation: Any, mode: Any, url: str, num_examples: int) -> None:
    @settings(BOUNDED, max_examples=num_examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=CHECKS, timeout=CASE_S)

    run()
