"""What a user does on the live page: waits for it, chooses, sends and waits for the answers."""

from __future__ import annotations

from playwright.sync_api import Page

ANSWER_MS = 180_000
"""Longest wait for answers; four strategies on a busy CPU need a minute."""


def open_page(page: Page, url: str) -> None:
    """Open the page of a server and wait until it is connected to the engine."""
    page.goto(url)
    page.wait_for_selector("#status.live", timeout=ANSWER_MS)


def set_slider(page: Page, name: str, value: float) -> None:
    """Move a slider to a value that it allows."""
    page.locator(f"#{name}").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }",
        value,
    )


def wait_for_answers(page: Page, button: str) -> None:
    """Wait until all requests that a button has sent are answered."""
    page.wait_for_selector(f"#{button}:not([disabled])", timeout=ANSWER_MS)
