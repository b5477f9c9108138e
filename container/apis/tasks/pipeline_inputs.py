"""Checks the inputs of transformers' pipelines: strings, base64 files, tables, conversations, and
objects of these.

Where a pipeline expects a file, it takes a string for a path or URL. Clients must not choose those,
so files are decoded to bytes here, and anything else is rejected.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Annotated, Literal, TypeVar, cast

import msgspec

from container.schema.kinds import is_list
from core.configuration.limits import IMAGES, PAGE_CHARACTERS, TASK_TEXT
from core.configuration.pipeline_tasks import FILES, Content, PipelineTask
from core.configuration.suggest import did_you_mean
from core.errors import RequestError

_DATA_URI = re.compile("data:(image|audio|video)/[a-z0-9.+-]+;base64,", re.IGNORECASE)

T = TypeVar("T")

_Object = Mapping[str, object]
_Reader = Callable[[object, str], object]
"""Checks and converts a value; the second argument is the field that errors name."""
_Coordinate = Annotated[int, msgspec.Meta(ge=0, le=1000)]
"""Thousandths of the page's width or height. Other values would index past the end of the model's
embedding table."""
_WordBox = tuple[str, tuple[_Coordinate, _Coordinate, _Coordinate, _Coordinate]]
"""A word with its left, top, right and bottom edges."""


class _TextPart(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    text: str


class _ImagePart(msgspec.Struct, frozen=True, tag="image", forbid_unknown_fields=True):
    """An image in transformers' format."""

    image: str


class _Url(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class _ImageUrlPart(msgspec.Struct, frozen=True, tag="image_url", forbid_unknown_fields=True):
    """An image in OpenAI's format."""

    image_url: _Url


_Part = _TextPart | _ImagePart | _ImageUrlPart


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[list[_Part], msgspec.Meta(min_length=1)]
    )


def read_input(value: object, field: str, task: PipelineTask) -> object:
    """Return the checked input, with files as bytes. Raises RequestError for a bad field."""
    if isinstance(task.reads, str):
        return _READERS[task.reads](value, field)
    fields = _object(value, field)
    for name in fields:
        if name not in task.reads:
            raise RequestError(f"{field}.{name}", f"no such field{did_you_mean(name, task.reads)}")
    checked: dict[str, object] = {}
    for name, content in task.reads.items():
        if fields.get(name) is not None:
            checked[name] = _READERS[content](fields[name], f"{field}.{name}")
        elif name not in task.optional:
            raise RequestError(f"{field}.{name}", "is missing")
    if "messages" in task.reads:
        _check_conversation(checked, field)
    return checked


def _check_conversation(fields: _Object, field: str) -> None:
    """Check that there is text, and that neither texts nor images are given twice.

    `messages` contains its own texts and images.
    """
    if "messages" in fields and len(fields) > 1:
        raise RequestError(field, "put texts and images into messages, not next to them")
    if "image" in fields and "images" in fields:
        raise RequestError(f"{field}.images", "cannot be combined with image; send one of them")
    if not fields.keys() & {"messages", "text"}:
        raise RequestError(f"{field}.text", "is missing")


def num_characters(value: object) -> int:
    """Return the length of all texts in a checked value."""
    match value:
        case str():
            return len(value)
        case dict():
            return sum(map(num_characters, chain.from_iterable(cast(_Object, value).items())))
        case list() | tuple():
            return sum(map(num_characters, cast(Iterable[object], value)))
        case _:
            return 0


def _any_text(value: object, field: str) -> object:
    if isinstance(value, str):
        return _text(value, field)
    if not value or not isinstance(value, dict):
        raise RequestError(field, "expected a non-empty string or object")
    fields = cast(_Object, value)
    return {name: _text(text, f"{field}.{name}") for name, text in fields.items()}


def _text(value: object, field: str) -> str:
    if not value or not isinstance(value, str):
        raise RequestError(field, "expected a non-empty string")
    TASK_TEXT.check(field, len(value))
    return value


def _object(value: object, field: str) -> _Object:
    if not value or not isinstance(value, dict):
        raise RequestError(field, "expected a non-empty object")
    return cast(_Object, value)


def _list(value: object, field: str, items: str) -> list[object]:
    if not value or not is_list(value):
        raise RequestError(field, f"expected a non-empty list of {items}")
    return value


def _file(content: Content) -> _Reader:
    """Return a reader for an image, audio or video file, sent in base64 or as the request body."""
    kind = FILES[content]

    def read(value: object, field: str) -> bytes:
        if isinstance(value, bytes):
            return value
        if not value or not isinstance(value, str):
            article = "a" if kind == "video" else "an"
            raise RequestError(field, f"expected {article} {kind} in base64")
        if value.lower().startswith(("http://", "https://")):
            raise RequestError(field, f"URLs are not fetched; send the {kind} itself in base64")
        try:
            return base64.b64decode(_DATA_URI.sub("", value, count=1), validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(field, "is not valid base64") from None

    return read


_image = _file("image")


def _images(value: object, field: str) -> list[object]:
    images = _list(value, field, "images in base64")
    IMAGES.check(field, len(images))
    return [_image(image, f"{field}[{index}]") for index, image in enumerate(images)]


def _table(value: object, field: str) -> Mapping[str, list[str]]:
    """Return the columns by name. Numbers become strings, which is how models read them.

    Raises RequestError if the columns differ in length.
    """
    columns = {
        name: [_cell(cell, f"{field}.{name}[{row}]") for row, cell in enumerate(cells)]
        for name, column in _object(value, field).items()
        for cells in [_list(column, f"{field}.{name}", "cells")]
    }
    if len({len(cells) for cells in columns.values()}) > 1:
        raise RequestError(field, "has columns of different lengths")
    TASK_TEXT.check(field, num_characters(columns))
    return columns


def _cell(value: object, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RequestError(field, "expected a string or a number")
    return str(value)


def _word_boxes(value: object, field: str) -> object:
    words = _converted(_list(value, field, "words with their boxes"), list[_WordBox], field)
    PAGE_CHARACTERS.check(field, num_characters(words))
    for index, (_, (left, top, right, bottom)) in enumerate(words):
        if left > right or top > bottom:  # the width and the height index embedding tables too
            raise RequestError(
                f"{field}[{index}][1]", "expected the left, top, right and bottom edge, in order"
            )
    return words


def _messages(value: object, field: str) -> list[_Object]:
    """Return messages whose content is a list of parts, with images as bytes."""
    checked = _converted(_list(value, field, "messages"), list[_Message], field)
    messages: list[_Object] = []
    for index, message in enumerate(checked):
        content = message.content
        parts = [_TextPart(content)] if isinstance(content, str) else content
        prefix = f"{field}[{index}].content"
        converted = [_part(part, f"{prefix}[{number}]") for number, part in enumerate(parts)]
        messages.append({"role": message.role, "content": converted})
    all_parts = [part for message in messages for part in _parts(message)]
    IMAGES.check(field, sum("image" in part for part in all_parts))
    TASK_TEXT.check(field, sum(num_characters(part.get("text")) for part in all_parts))
    return messages


def _parts(message: _Object) -> list[_Object]:
    return cast(list[_Object], message["content"])


def _part(part: _Part, field: str) -> _Object:
    """Return the part in the format of transformers' processors."""
    match part:
        case _TextPart(text):
            return {"type": "text", "text": text}
        case _ImagePart(image):
            return {"type": "image", "image": _image(image, f"{field}.image")}
        case _ImageUrlPart(image_url):
            return {"type": "image", "image": _image(image_url.url, f"{field}.image_url.url")}


def _converted(value: object, kind: type[T], field: str) -> T:
    """Convert with msgspec. Raises RequestError, naming the position of a wrong value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise RequestError(field + path.removesuffix("`"), message) from None


_READERS: Mapping[Content, _Reader] = {
    "any text": _any_text,
    "text": _text,
    "image": _image,
    "audio": _file("audio"),
    "video": _file("video"),
    "images": _images,
    "table": _table,
    "word boxes": _word_boxes,
    "messages": _messages,
}
