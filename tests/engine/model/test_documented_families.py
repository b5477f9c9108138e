"""docs/models.md lists all families of our layers, and two pages give the decoder's number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.encoder import families as encoder_families
from engine.model.families import FAMILIES

ROOT = Path(__file__).parents[3]


def table(heading):
    """Return the cells of a table of docs/models.md by family, which the first column names."""
    text = (ROOT / "docs" / "models.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    _, *rows = rows  # without the heading of the columns
    return {name: cells for first, *cells in rows for name in re.findall(r"`([\w-]+)`", first)}


def documented():
    """Return the column "one call" of the table of decoders, by family."""
    return {name: cells[-1] for name, cells in table("Families of our own decoder").items()}


def test_the_page_has_every_family():
    assert documented().keys() == FAMILIES.keys(), "docs/models.md must list these"
    assert set(documented().values()) == {"yes", "no"}
    assert table("Encoders").keys() == encoder_families.FAMILIES.keys()


@pytest.mark.parametrize("page", ["README.md", "docs/operate.md"])
def test_pages_give_the_number_of_families(page):
    assert f"[{len(FAMILIES)} families]" in (ROOT / page).read_text()
