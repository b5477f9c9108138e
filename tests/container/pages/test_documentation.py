"""Generated documents are up to date."""

from __future__ import annotations

from pathlib import Path

from container.configuration.report import limit_lines, markdown_lines
from container.front_end import contract
from core.configuration import limits

DOCS = Path(__file__).parents[3] / "docs" / "reference"


def test_configuration_md_equals_the_option_table() -> None:
    path = DOCS / "configuration.md"
    assert path.read_text() == "\n".join([*markdown_lines(), ""]), "run `make docs`"


def test_limits_md_equals_the_table_which_has_every_limit() -> None:
    path = DOCS / "limits.md"
    assert path.read_text() == "\n".join([*limit_lines(), ""]), "run `make docs`"
    defined = [value for value in vars(limits).values() if isinstance(value, limits.Limit)]
    assert [limit for limit in defined if limit not in limits.LIMITS] == []


def test_contract_md_equals_the_tables_of_fields_and_routes() -> None:
    page = (DOCS / "contract.md").read_text()
    assert page == contract.with_tables(page), "run `make docs`"
    assert "<!-- end of routes -->" in page
    assert page.endswith("<!-- end of fields -->\n")
