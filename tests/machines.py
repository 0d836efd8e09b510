"""Settings for hypothesis: of all tests, and of state machines, whose failures are to be reported in time.

How long an example takes says more about what else the machine does than about the code, so no test has a deadline but
pytest's.

CI (`-m "not full"`) draws SAMPLED examples for a test that does not say how many; other runs have hypothesis' hundred.
It plays a part of the runs of the machines that take long; all of them are marked `full`.

Hypothesis makes a failing run smaller for up to five minutes, which is beyond pytest's limit for a test, and then no
test is reported at all. So a machine that fails reports the run in which it did, at once and as it was. To have it made
smaller: `pytest FILE --hypothesis-profile=shrink --timeout=0`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

SHRINK = "shrink"
PATIENT, SAMPLE = "patient", "sample"
SAMPLED = 40
settings.register_profile(PATIENT, settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(SAMPLE, settings.get_profile(PATIENT), max_examples=SAMPLED)
settings.load_profile(PATIENT)
settings.register_profile(SHRINK, settings.default)


def machine(max_examples: int, steps: int) -> settings:
    """Of so many runs with so many steps each. How long one takes is the business of pytest's limit."""
    shrinks = settings.get_current_profile_name() == SHRINK
    phases = [phase for phase in Phase if shrinks or phase not in (Phase.shrink, Phase.explain)]
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
