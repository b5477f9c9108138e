"""docs/models.md lists all families of our layers, and two pages give the decoder's number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.encoder import families as encoder_families
from engine.model.families import FAMILIES

ROOT = Path(__file__).parents[3]


def documented(heading, row=r"(`.+`) \| .+"):
    """Return the families in the first column of the table below a heading of docs/models.md."""
    text = (ROOT / "docs" / "models.md").read_text()
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(rf"^\| {row} \|$", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}


def test_the_page_has_every_family():
    found = documented("Families of our own decoder", r"(`.+`) \| .+ \| (?:yes|no)")
    assert found == FAMILIES.keys(), "docs/models.md must list these"
    assert documented("Encoders") - {"model_type"} == encoder_families.FAMILIES.keys()


@pytest.mark.parametrize("page", ["README.md", "docs/operate.md"])
def test_pages_give_the_number_of_families(page):
    assert f"[{len(FAMILIES)} families]" in (ROOT / page).read_text()
