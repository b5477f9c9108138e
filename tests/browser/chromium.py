"""Finds and starts a headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

VARIABLE = "CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome")
# The sandbox needs user namespaces, which containers lack. Only our own page is opened, so there is
# no need for it.
FLAGS = ("--no-sandbox", "--disable-gpu")


class NoBrowserError(Exception):
    """There is no Chromium on this machine."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium, and stop it at the end. Raises NoBrowserError if there is none."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_path(playwright), args=FLAGS)
        yield browser
        browser.close()


def _path(playwright: Playwright) -> str:
    """Return the path that CHROMIUM names, else Playwright's own browser, else the system's."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        if not Path(given).is_file():
            raise NoBrowserError(f"{VARIABLE}={given} is not a file; set it to a Chromium's path")
        return given
    own = playwright.chromium.executable_path
    found = own if Path(own).is_file() else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoBrowserError(
            "no Chromium found; run `.browser/bin/playwright install --with-deps chromium`, or set "
            f"{VARIABLE} to the path of one"
        )
    return found
