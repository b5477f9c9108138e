"""Generated documents are up to date."""

from __future__ import annotations

from pathlib import Path

from container.configuration.report import markdown_lines


def test_configuration_md_equals_the_option_table() -> None:
    path = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert path.read_text() == "\n".join([*markdown_lines(), ""]), "run `make docs`"
