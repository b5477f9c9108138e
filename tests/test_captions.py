"""Generated texts go between their markers, and the README's table has the measured figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.captions import fill, marked_texts
from tests.browser.peer_table import peer_table

ROOT = Path(__file__).resolve().parents[1]
PAGE = "![a](a.png)\n\n<!-- made: a.png -->\nold\n<!-- end -->\n\nText.\n"


def test_texts_replace_what_is_between_their_markers(tmp_path: Path) -> None:
    one, two = tmp_path / "one.md", tmp_path / "two.md"
    one.write_text(PAGE)
    two.write_text("Text.\n" + PAGE.replace("a.png", "b.png"))
    fill([one, two], {"a.png": "| new |\n| rows |"})
    assert one.read_text() == PAGE.replace("old", "| new |\n| rows |")
    assert marked_texts(one.read_text()) == {"a.png": "| new |\n| rows |"}
    assert marked_texts(two.read_text()) == {"b.png": "old"}


def test_a_text_without_a_place_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match=r"no page has markers for c\.png; write `<!-- made: NAME"):
        fill([page], {"a.png": "new", "c.png": "new"})
    assert page.read_text() == PAGE


def test_the_table_of_the_readme_has_the_measured_figures() -> None:
    readme = (ROOT / "README.md").read_text()
    assert marked_texts(readme)["vllm"] == peer_table(ROOT / "benchmarks" / "results")
