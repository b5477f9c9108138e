"""Documents that are made from code are what the code says."""

from __future__ import annotations

from pathlib import Path

from container.configuration.report import markdown_lines


def test_configuration_md_is_the_option_table() -> None:
    path = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert path.read_text() == "\n".join([*markdown_lines(), ""]), "run `make docs`"
