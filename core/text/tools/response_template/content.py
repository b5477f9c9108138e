"""Parses what stands between the marks of a field, as transformers' `chat_parsing` does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import regex

from core.text.tools.response_template.template import PLACEHOLDER, Field

TIMEOUT_S = 0.2
"""For each search by a template's pattern, in seconds of CPU time. A search that takes longer ends
with a TimeoutError: no answer may hold up the others."""
_Args = Mapping[str, Any]


def field_value(field: Field, body: str, captures: Mapping[str, str]) -> object:
    """Return the value of a field with this text between its marks.

    captures: named groups of its opening mark. Raises ValueError or TimeoutError if the text does
    not have the field's form.
    """
    value = _parse(body, field.content, field.content_args)
    if field.transform is None:
        return value
    if not field.transforms_each:
        return _filled(field.transform, {**captures, "content": value})
    if not isinstance(value, list):
        raise ValueError("not a list")
    items = cast(list[object], value)
    return [_filled(field.transform, {**captures, **_object(item)}) for item in items]


def _parse(text: str, content: str, args: _Args) -> object:
    return _PARSERS[content](text, args)


def _text(text: str, args: _Args) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: _Args) -> object:
    """Parse JSON, or a dialect: with keys without quotes, or strings between other marks."""
    strings: list[str] = []

    def keep(match: Any) -> str:
        strings.append(json.dumps(match[1]))
        return f"\x01{len(strings) - 1}\x02"

    plain = text
    for opening, closing in args.get("string_delims", ()):
        pattern = f"{regex.escape(opening)}(.*?){regex.escape(closing)}"
        plain = regex.sub(pattern, keep, plain, flags=regex.DOTALL, timeout=TIMEOUT_S)
    if args.get("unquoted_keys"):
        plain = regex.sub(r"(?<=[{,])\s*(\w+):", r'"\1":', plain)
    if strings:
        plain = regex.sub("\x01(\\d+)\x02", lambda match: strings[int(match[1])], plain)
    try:
        return json.loads(plain)
    except (ValueError, RecursionError) as error:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise ValueError(f"not JSON: {error}") from None


def _xml(text: str, args: _Args) -> dict[str, object]:
    """Parse tags, found by a pattern with the groups `key` and `value`."""
    found: dict[str, object] = {}
    repeated = set[str]()
    for match in regex.finditer(args["tag_pattern"], text, flags=regex.DOTALL, timeout=TIMEOUT_S):
        key, value = match["key"], _nested(match["value"] or "", args)
        if key not in found or not args.get("merge_duplicates"):
            found[key] = value
        else:
            earlier = found[key] if key in repeated else [found[key]]
            found[key] = [*cast(list[object], earlier), value]
            repeated.add(key)
    return found


def _lines(text: str, args: _Args) -> dict[str, object]:
    """Parse lines of a key, a separator and a value."""
    separator = args.get("kv_sep", ":")
    found: dict[str, object] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, mark, value = _text(line, args).partition(separator)
        if mark:
            found[_text(key, args)] = _nested(_text(value, args), args)
    return found


def _nested(text: str, args: _Args) -> object:
    parser = args.get("value_parser")
    return text if parser is None else _parse(text, parser["name"], parser.get("args", {}))


_PARSERS: Mapping[str, Callable[[str, _Args], object]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml,
    "kv-lines": _lines,
}


def _filled(shape: object, values: Mapping[str, object]) -> object:
    """Return the shape with its placeholders replaced. `{content.name}` is a value in another."""
    if isinstance(shape, dict):
        entries = cast(dict[str, object], shape)
        return {key: _filled(value, values) for key, value in entries.items()}
    if isinstance(shape, list):
        return [_filled(value, values) for value in cast(list[object], shape)]
    placeholder = PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if placeholder is None:
        return shape
    value: object = values
    for key in placeholder[1].split("."):
        entries = _object(value)
        if key not in entries:
            raise ValueError(f"{{{placeholder[1]}}} is missing")
        value = entries[key]
    return value


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError("not an object")
    return cast(Mapping[str, object], value)
