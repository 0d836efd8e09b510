"""`make demo`, as a newcomer runs it."""

from __future__ import annotations

import pytest

from tests.deploy.spawned import Process


@pytest.mark.timeout(240)
def test_demo_shows_all_that_it_promises() -> None:
    with Process("-m", "tools.demo") as demo:
        assert demo.wait_end(200) == 0, demo.log
        demo.wait_for(r"ready after [\d.]+ s")
        demo.wait_for(r"A chat answer, as it comes\n +> .*\n +\w+")
        demo.wait_for(r"[\d.]+ MB of KV cache handed over, first token after \d+ ms")
        demo.wait_for(r"prefill-0 had 1,\d\d\d of the tokens in its cache, decode-0 1,\d\d\d")
        assert demo.log.count("✓") == 2 + 8
        demo.wait_for(r"the \d+ KV blocks that decode-0 held are back\n +[\d,]+ free \+ [\d,]+ cached = [\d,]+")
        rows = demo.log.split("Where the time went")[1].split("phases in ms")[0].splitlines()
        assert len([row for row in rows if row.count("  ") > 5 and "." in row]) == 1 + 2 + 8
        demo.wait_for(r"Go on with")
