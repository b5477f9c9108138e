"""docs/models.md lists all families of our decoder, and two pages give their number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.model.families import FAMILIES

ROOT = Path(__file__).parents[3]


def documented():
    """Return the column "one call" of the table in docs/models.md, by family."""
    text = (ROOT / "docs" / "models.md").read_text()
    section = text.partition("\n## Families of our own decoder\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| .+ \| (yes|no) \|$", section, flags=re.MULTILINE)
    return {name: one_call for names, one_call in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_page_has_every_family():
    assert documented().keys() == FAMILIES.keys(), "docs/models.md must list these"


@pytest.mark.parametrize("page", ["README.md", "docs/operate.md"])
def test_pages_give_the_number_of_families(page):
    assert f"[{len(FAMILIES)} families]" in (ROOT / page).read_text()
