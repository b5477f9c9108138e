"""Parses a form with files (multipart/form-data) into a dict of fields."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import FormDataParser
from werkzeug.http import parse_options_header

from container.schema.fields import Field, Fields
from core.configuration.limits import FORM_PARTS, FORM_TEXT
from core.errors import RequestError

MIMETYPE = "multipart/form-data"
_BOOLEANS = {"true": True, "false": False}


def read_form(body: bytes, content_type: str, fields: Fields) -> dict[str, object]:
    """Return the fields of a form: files as bytes, texts as the kinds that `fields` asks for.

    A field is a list if its kind is one, or if its name ends with [], as OpenAI's clients write it.
    Only a list may be sent as several parts. Raises RequestError if the form is malformed or beyond
    its limits.
    """
    mimetype, options = parse_options_header(content_type)
    parser = FormDataParser(
        _in_memory,
        max_form_memory_size=FORM_TEXT.maximum,
        max_form_parts=FORM_PARTS.maximum,
        silent=False,
    )
    try:
        _, texts, files = parser.parse(BytesIO(body), mimetype, len(body), options)
    except RequestEntityTooLarge:
        raise RequestError(
            "body",
            f"has more than {FORM_PARTS.maximum} parts, or a text of more than "
            f"{FORM_TEXT.maximum:,} bytes",
        ) from None
    except ValueError as error:
        raise RequestError("body", f"is not a form: {error}") from None
    if not all((*texts, *files)):
        raise RequestError("body", "has a part without a name")
    values: dict[str, object] = {name: file.stream.read() for name, file in files.items()}
    for name, given in texts.lists():
        plain = name.removesuffix("[]")
        if plain in values:
            raise RequestError(plain, "is given twice")
        values[plain] = _typed(plain, given, fields.get(plain), is_list=plain != name)
    return values


def _in_memory(
    total_content_length: int | None,
    content_type: str | None,
    filename: str | None,
    content_length: int | None = None,
) -> BytesIO:
    return BytesIO()  # werkzeug's own choice is a file on disk for more than 500 KB


def _typed(name: str, texts: Sequence[str], field: Field | None, *, is_list: bool) -> object:
    kind = field.kind.schema.get("type") if field is not None else None
    if kind == "array" or is_list:
        return list(texts)
    if len(texts) > 1:
        raise RequestError(name, "is given twice")
    (text,) = texts
    if kind == "boolean":
        return _BOOLEANS.get(text.lower(), text)
    return _number(text) if kind == "number" else text


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
