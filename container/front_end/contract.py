"""The tables of routes and fields in docs/reference/contract.md, which `make docs` writes.

They come from the tables that requests are checked against.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from container.apis.table import APIS
from container.schema.fields import Field, Fields
from core.configuration.task import Kind

_KINDS: Mapping[Kind, str] = {
    "generation": "text generation", "embedding": "embeddings", "pipeline": "pipelines",
    "handler": "a model.py",
}  # fmt: skip
_EFFECTS = {"supported": "yes", "ignored": "no effect", "unsupported": "refused"}


def with_tables(page: str) -> str:
    """Return the text of docs/reference/contract.md with the tables of routes and fields as they
    are now.

    They stand between markers. The rest of the page is written by hand.
    """
    fields = (line for title, fields in field_tables().items() for line in _table(title, fields))
    return _with_part(_with_part(page, "routes", _routes()), "fields", fields)


def field_tables() -> Mapping[str, Fields]:
    """Return every table of body fields, by title."""
    bodies = (body for api in APIS for route in api.routes for body in route.bodies)
    return {table.title: table.fields for body in bodies for table in body.tables if table.title}


def _with_part(page: str, name: str, lines: Iterable[str]) -> str:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    return "".join([before, begin, *(f"{line}\n" for line in lines), end, rest.partition(end)[2]])


def _routes() -> Iterator[str]:
    """Yield the table of routes, with the kinds of models that have each."""
    yield from ("", "| route | defined by | kinds of models | what it does |")
    yield "| --- | --- | --- | --- |"
    rows = [(api, route) for api in APIS for route in api.routes if route.summary]
    for api, route in sorted(rows, key=lambda row: row[1].documented_path):
        has_all = len(api.kinds) == len(_KINDS)
        models = "all" if has_all else ", ".join(_KINDS[kind] for kind in api.kinds)
        path = f"`{route.method} {route.documented_path}`"
        yield f"| {path} | {api.owner} | {models} | {route.summary} |"
    yield ""


def _table(title: str, fields: Fields) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| field | supported | meaning |", "| --- | --- | --- |")
    for name in sorted(fields):
        yield f"| `{name}` | {_EFFECTS[fields[name].effect]} | {_description(fields[name])} |"


def _description(field: Field) -> str:
    if field.effect == "ignored" or not field.neutral:
        return field.doc.replace("|", "\\|")
    values = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in field.neutral)
    return f"{field.doc} Accepted: {values}."
