"""The page of a recording: one scrubs, the pictures follow, and a request says why it waited."""

from __future__ import annotations

import re

from playwright.sync_api import Page

from tests.browser.replay_page import LONGEST_ANSWER_MS, explain_longest_wait, open_recording

MOVE = """(slider, share) => {
  slider.value = share * slider.max;
  slider.dispatchEvent(new Event("input"));
}"""


def scrub(page: Page, share: float) -> None:
    """Move to a share of the recording, and wait for the state of that moment."""
    with page.expect_response(re.compile("moment")):
        page.locator("#scrub").evaluate(MOVE, share)


def test_the_pictures_follow_the_moment(page: Page, recording: str) -> None:
    open_recording(page, recording)
    assert int(page.inner_text("#queue")) > 0, "it opens where most requests wait"
    seen = set()
    for share in (0.0, 0.3, 0.6, 1.0):
        scrub(page, share)
        page.wait_for_timeout(100)
        seen.add((page.inner_text("#moment"), page.get_attribute("#blocks", "aria-label")))
    assert len(seen) == 4
    assert page.get_attribute("#batch", "aria-label").endswith("0 running, 0 waiting")
    before = page.inner_text("#moment")
    page.click("#before")
    assert page.inner_text("#moment") != before
    with page.expect_response(re.compile("again=1")):
        page.click("#again")
    page.wait_for_selector("#status.live", timeout=LONGEST_ANSWER_MS)
    assert "0 running" in page.get_attribute("#batch", "aria-label")


def test_a_click_on_a_request_says_why_it_waited(page: Page, recording: str) -> None:
    open_recording(page, recording)
    page.locator("#batch").click(position={"x": 200, "y": 6})
    page.wait_for_selector("#why .receipt", timeout=LONGEST_ANSWER_MS)
    clicked = page.inner_text("#request-name")
    assert re.fullmatch(r"#\d+", clicked)
    explain_longest_wait(page)
    id = page.input_value("#request")
    assert re.search(r"ms for \d+ blocks held by #\d+", page.inner_text("#why"))
    page.locator(".chips .chip").first.click()
    page.wait_for_selector(f"#request-name:not(:text-is('#{id}'))")


def figures(page: Page) -> list[list[str]]:
    """Return the figures of both futures."""
    page.wait_for_selector("#futures .panel", timeout=LONGEST_ANSWER_MS)
    panels = page.locator("#futures .panel")
    return [panel.locator("dd:not(.change)").all_inner_texts() for panel in panels.all()]


def test_a_fork_shows_both_futures(page: Page, recording: str) -> None:
    open_recording(page, recording)
    page.click("#fork .main")
    assert "Choose" in page.inner_text("#fork-note")
    page.select_option("#fork-batching", "none")
    page.click("#fork .main")
    before, after = figures(page)
    assert len(before) == 8
    assert before != after
    states = page.locator("#futures .state").all_inner_texts()
    assert states[0] == ""
    assert "computed again" in states[1]
    names = page.locator("#futures .name").all_inner_texts()
    assert names == ["The recorded options", "batching=none"]
    for batch in page.locator("#futures .batch").all():
        assert not batch.get_attribute("aria-label").startswith("No")
