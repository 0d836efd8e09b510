"""The console in a real browser, in front of real nodes: what it shows, and that a keyboard is enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import House
from tools.browser import Browser, find_chromium

PROMPT = "What is 12 + 30?"
NAME_OF_FOCUS = "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
MAX_TABS = 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here (Debian's package chromium)")
    with Browser(program) as browser:
        yield browser
        assert browser.problems == []


def in_page(browser: Browser, selector: str) -> str:
    """The text of an element."""
    return str(browser.evaluate(f"document.querySelector({selector!r}).textContent"))


def tab_to(browser: Browser, wanted: str) -> list[str]:
    """Presses Tab until that element, by its id or class, has the focus; the names of all on the way."""
    seen: list[str] = []
    while wanted not in seen:
        assert len(seen) < MAX_TABS, seen
        browser.press("Tab")
        seen.append(browser.evaluate(NAME_OF_FOCUS))
    return seen


def test_it_shows_the_fleet_an_answer_and_its_stages_to_a_keyboard(house: House, browser: Browser) -> None:
    browser.open(f"{house.chunk_64.url}/")
    browser.wait_for("document.querySelectorAll('.card.up').length === 2")
    names = browser.evaluate("[...document.querySelectorAll('.card .name')].map((name) => name.textContent)")
    assert names == ["prefill-64", "decode-large"]
    described = browser.evaluate("document.querySelector('#fleet-picture svg').getAttribute('aria-label')")
    assert described.startswith("1 prefill node and 1 decode node")
    assert in_page(browser, "#status") == "ready"
    assert "Read-only" in in_page(browser, "#fleet-actions"), "the router has no admin key"

    on_the_way = tab_to(browser, "chat-text")
    assert on_the_way[:2] == ["skip", "keys-button"]
    browser.type(PROMPT)
    browser.press("Enter")
    browser.wait_for("document.querySelector('.said.assistant .bar span')")
    answer = in_page(browser, ".said.assistant p")
    assert answer
    assert "First token after" in in_page(browser, ".said.assistant")
    assert browser.evaluate("document.getElementById('chat-log').ariaBusy") == "false"

    browser.wait_for("document.querySelector('#request-rows tr .bar .stage-prefill')")
    browser.wait_for("document.querySelector('#plot-ttft .dot')")
    tab_to(browser, "link-button")  # of the chat, behind its log
    browser.press("Enter")
    browser.wait_for("document.querySelector('#details[open] .facts')")
    details = in_page(browser, "#details-body")
    assert "prefill-64 → decode-large" in details
    assert "policy cost: a pair" in details
    assert "decode node alone would" in details
    assert "prefill" in in_page(browser, "#details-body tbody")
    browser.press("Escape")
    browser.wait_for("!document.getElementById('details').open")


def test_with_keys_it_asks_for_them_and_drains_a_node(house: House, browser: Browser) -> None:
    _, wide, _, small = house.nodes
    router = house.cluster.router([wide], [small], "--api-key=client", "--admin-api-key=operator", name="with-keys")
    router.wait_page("/ready")
    known = len(browser.problems)
    browser.open(f"{router.url}/")
    browser.wait_for("document.getElementById('keys').open")
    browser.evaluate("document.getElementById('api-key').focus()")
    browser.type("client")
    browser.press("Enter")
    browser.wait_for("document.querySelectorAll('.card').length === 2")
    refused = browser.problems[known:]
    assert refused
    assert all("401" in problem for problem in refused), refused
    del browser.problems[known:]

    assert "Enter the admin key" in in_page(browser, "#fleet-actions")
    browser.evaluate("document.getElementById('fleet-text').open = true")
    browser.evaluate("document.querySelector('#fleet-actions button').click()")
    browser.evaluate("document.getElementById('admin-key').focus()")
    browser.type("operator")
    browser.press("Enter")
    drain = f"document.querySelector('#fleet-rows button[aria-label=\"Drain {wide.name}\"]')"
    browser.wait_for(drain)
    browser.evaluate(f"{drain}.click()")
    browser.evaluate("document.getElementById('confirm-yes').click()")
    browser.wait_for(f"!document.querySelector('#fleet-rows').textContent.includes('{wide.name}')")
    assert router.metric("baton:nodes", node_role="prefill") == 0
    assert browser.evaluate("JSON.stringify(localStorage)") == "{}", "keys are the tab's alone"
    router.close()


def test_it_fits_a_narrow_screen_in_both_schemes(house: House, browser: Browser) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        browser.open(f"{house.alone.url}/", width=360, height=740, scheme=scheme)
        browser.wait_for("document.querySelectorAll('.card.up').length === 1")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 360, "nothing is beside the screen"
        grounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
