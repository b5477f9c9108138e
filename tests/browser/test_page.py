"""The live page as a user sees it: answers stream, the pictures move, all strategies answer."""

from __future__ import annotations

import re
from itertools import pairwise

from playwright.sync_api import Page

from tests.browser.conftest import Look
from tests.browser.live_page import open_page, set_slider, wait_for_answers

WATCH_TEXT = """() => {
  window.seen = [];
  const messages = document.getElementById("messages");
  new MutationObserver(() => seen.push(messages.lastElementChild.textContent)).observe(
    messages, { childList: true, characterData: true, subtree: true });
}"""
"""Collects the last message as it grows."""
MOST_BURSTS = 20
"""A fast machine answers one between two snapshots of the engine."""
WATCH_DRAFTS = """() => {
  window.seen = { pictures: new Set(), labels: new Set(), decisions: new Set() };
  window.timer = setInterval(() => {
    const drafts = document.getElementById("drafts");
    seen.pictures.add(drafts.toDataURL());
    seen.labels.add(drafts.ariaLabel);
    seen.decisions.add(document.getElementById("decision").textContent);
  }, 50);
}"""
WATCH_PICTURES = """() => {
  window.seen = { batch: new Set(), blocks: new Set(), labels: new Set(), groups: new Set() };
  window.timer = setInterval(() => {
    for (const name of ["batch", "blocks"]) {
      seen[name].add(document.getElementById(name).toDataURL());
    }
    seen.labels.add(document.getElementById("batch").ariaLabel);
    seen.groups.add(document.getElementById("groups").ariaLabel);
  }, 50);
}"""
"""Collects the distinct pictures, and what is said about them to screen readers."""
BRIGHTNESS = """() => {
  const [red, green, blue] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g);
  return (Number(red) + Number(green) + Number(blue)) / 3;
}"""


def test_a_chat_streams(page: Page, one_strategy: str, look: Look) -> None:
    open_page(page, one_strategy)
    assert (page.evaluate(BRIGHTNESS) < 80) == (look.scheme == "dark")
    page.evaluate(WATCH_TEXT)
    page.fill("#text", "Speak.")
    page.click("#send")
    wait_for_answers(page, "send")
    question, answer = page.locator(".message").all_inner_texts()
    assert question == "Speak."
    assert answer
    growing = [text for text in page.evaluate("seen") if text != "Speak."]
    assert all(after.startswith(before) for before, after in pairwise(growing))
    assert len(set(growing)) > 3, "the answer does not arrive in pieces"


def test_the_batch_and_the_kv_memory_move(page: Page, one_strategy: str) -> None:
    open_page(page, one_strategy)
    page.wait_for_selector("#batch[aria-label^='0 requests']")
    page.evaluate(WATCH_PICTURES)
    page.click("#burst")
    wait_for_answers(page, "burst")
    page.wait_for_selector("#batch[aria-label$='0 running, 0 waiting']")
    seen = page.evaluate(
        "clearInterval(timer), "
        "({ batch: seen.batch.size, blocks: seen.blocks.size, labels: [...seen.labels] })"
    )
    assert seen["batch"] > 3
    assert seen["blocks"] > 3
    running = [int(re.search(r"(\d+) running", label)[1]) for label in seen["labels"] if label]
    assert max(running) == 8
    answers = page.locator(".answer p").all_inner_texts()
    assert len(answers) == 8
    assert all(answers)


def test_cache_groups_and_freed_windows_are_drawn(page: Page, with_windows: str) -> None:
    open_page(page, with_windows)
    page.wait_for_selector("#groups[aria-label*='read 64 tokens']")
    assert not page.is_visible("#recorded")
    assert "in layers with a window" in page.inner_text("#blocks-legend")
    set_slider(page, "max-tokens", 192)
    page.evaluate(WATCH_PICTURES)
    page.click("#burst")
    wait_for_answers(page, "burst")
    labels = page.evaluate("clearInterval(timer), [...seen.groups]")
    pattern = r"1 layer reads all tokens: (\d+) blocks held in each group, 0 freed; "
    found = [re.match(pattern + r"3 layers read 64 tokens.*: (\d+) .* (\d+) freed", label)
             for label in labels]  # fmt: skip
    assert max(int(match[3]) for match in found) > 0
    assert any(0 < int(match[2]) < int(match[1]) for match in found)


def test_slots_of_states_are_drawn(page: Page, with_states: str) -> None:
    open_page(page, with_states)
    page.wait_for_selector("#slots[aria-label^='states in 0 of 16 slots, ']")
    set_slider(page, "max-tokens", 64)
    page.evaluate(
        "window.seen = new Set(); window.timer = setInterval("
        "() => seen.add(document.getElementById('slots').ariaLabel), 50)"
    )
    page.click("#burst")
    wait_for_answers(page, "burst")
    labels = page.evaluate("clearInterval(timer), [...seen]")
    found = [[int(number) for number in re.findall(r"\d+", label)] for label in labels]
    assert max(held for held, _, _ in found) > 1
    page.wait_for_selector("#slots[aria-label^='states in 0 of 16']")
    assert not page.get_attribute("#slots", "aria-label").endswith(
        " 0 kept for prompts that begin alike"
    )


def test_the_page_shows_nothing_of_what_is_off(page: Page, one_strategy: str) -> None:
    """Neither groups, of which the model has one, nor states or speculation."""
    open_page(page, one_strategy)
    page.wait_for_selector("#blocks[aria-label$='kept for equal prompts']")
    assert not page.is_visible("#groups")
    assert not page.is_visible("#slots")
    assert not page.is_visible("#speculation")
    assert page.is_visible("#recorded")
    assert "window" not in page.inner_text("#blocks-legend")


def test_speculation_shows_what_it_decides_and_gains(page: Page, with_drafts: str) -> None:
    open_page(page, with_drafts)
    assert "up to 5 drafts from text before" in page.inner_text("#speculation")
    page.wait_for_selector("#drafts[aria-label='No drafts: no request decodes']")
    set_slider(page, "temperature", 0)
    set_slider(page, "max-tokens", 256)
    page.fill("#text", "Juliet: O Romeo, Romeo, wherefore art thou Romeo?\n" * 6)
    page.evaluate(WATCH_DRAFTS)
    pattern = r"([\d.]+) tokens a step, \d+ % of the drafts right"
    for _ in range(MOST_BURSTS):
        page.click("#burst")
        wait_for_answers(page, "burst")
        seen = page.evaluate(
            "({ pictures: seen.pictures.size, labels: [...seen.labels], "
            "decisions: [...seen.decisions].join() })"
        )
        found = [match for label in seen["labels"] if (match := re.fullmatch(pattern, label))]
        most = max((float(match[1]) for match in found), default=1.0)
        if most > 1.2:
            break
    page.evaluate("clearInterval(timer)")
    assert most > 1.2
    assert seen["pictures"] > 1
    assert "steps have drafts now" in seen["decisions"]
    page.wait_for_selector("#decision:text-is('No request decodes now.')")


def test_all_strategies_answer_the_same_requests(page: Page, all_strategies: str) -> None:
    open_page(page, all_strategies)
    set_slider(page, "max-tokens", 32)
    page.click("#send")
    wait_for_answers(page, "send")
    panels = page.locator(".panel")
    assert panels.locator(".name").all_inner_texts() == ["none", "dynamic", "continuous", "paged"]
    assert panels.locator(".state").all_inner_texts() == ["done"] * 4
    for panel in panels.all():
        assert panel.locator(".batch").get_attribute("aria-label").startswith("8 requests")
        assert re.match(r"[\d.]+", panel.locator(".rate").inner_text())
        panel.locator("summary").click()
        answers = panel.locator(".answer p").all_inner_texts()
        assert len(answers) == 8
        assert all(answers)
