"""The inputs of transformers' pipelines: files in base64, tables, conversations, objects of them.

Where a pipeline takes a text for a file, it is the path or the address of one, which nobody but the
server's owner may name. So files become bytes here, and whatever else is said in their place is
refused.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeVar, cast

import msgspec

from container.schema.kinds import is_list
from core.errors import RequestError
from core.pipeline_tasks import FILES, Content, PipelineTask
from core.suggest import did_you_mean

MAX_IMAGES = 32
"""In one input."""
_DATA_URI = re.compile("data:(image|audio|video)/[a-z0-9.+-]+;base64,", re.IGNORECASE)

T = TypeVar("T")

_Object = Mapping[str, object]
_Reader = Callable[[object, str], object]
"""Of a value and what it is called."""
_Place = Annotated[int, msgspec.Meta(ge=0, le=1000)]
"""In thousandths of a page's width or height. What lies outside, a model would look up beyond the
end of a table."""
_WordBox = tuple[str, tuple[_Place, _Place, _Place, _Place]]
"""A word, with its left, upper, right and lower edge."""


class _TextPart(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    text: str


class _ImagePart(msgspec.Struct, frozen=True, tag="image", forbid_unknown_fields=True):
    """As transformers has it."""

    image: str


class _Url(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str


class _ImageUrlPart(msgspec.Struct, frozen=True, tag="image_url", forbid_unknown_fields=True):
    """As OpenAI has it."""

    image_url: _Url


_Part = _TextPart | _ImagePart | _ImageUrlPart


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: (
        Annotated[str, msgspec.Meta(min_length=1)]
        | Annotated[list[_Part], msgspec.Meta(min_length=1)]
    )


def read_input(value: object, field: str, task: PipelineTask) -> object:
    """One input, checked, with files as bytes. Raises RequestError that names the mistake."""
    if isinstance(task.reads, str):
        return _READERS[task.reads](value, field)
    given = _object(value, field)
    for name in given:
        if name not in task.reads:
            raise RequestError(f"{field}.{name}", f"no such field{did_you_mean(name, task.reads)}")
    read: dict[str, object] = {}
    for name, content in task.reads.items():
        if given.get(name) is not None:
            read[name] = _READERS[content](given[name], f"{field}.{name}")
        elif name not in task.optional:
            raise RequestError(f"{field}.{name}", "is missing")
    if "messages" in task.reads:
        _check_conversation(read, field)
    return read


def _check_conversation(read: _Object, field: str) -> None:
    """A conversation holds its own images, and there is something to go on from."""
    if "messages" in read and len(read) > 1:
        raise RequestError(field, "texts and images belong into messages where those are given")
    if "image" in read and "images" in read:
        raise RequestError(f"{field}.images", "is given twice: there is image, too")
    if not read.keys() & {"messages", "text"}:
        raise RequestError(f"{field}.text", "is missing")


def _any_text(value: object, field: str) -> object:
    if not value or not isinstance(value, str | dict):
        raise RequestError(field, "expected a text or an object that is not empty")
    return cast(object, value)


def _text(value: object, field: str) -> str:
    if not value or not isinstance(value, str):
        raise RequestError(field, "expected a text that is not empty")
    return value


def _object(value: object, field: str) -> _Object:
    if not value or not isinstance(value, dict):
        raise RequestError(field, "expected an object that is not empty")
    return cast(_Object, value)


def _list(value: object, field: str, of: str) -> list[object]:
    if not value or not is_list(value):
        raise RequestError(field, f"expected a list of {of} that is not empty")
    return value


def _file(content: Content) -> _Reader:
    """Of the bytes of an image's, a sound's or a video's file."""
    kind = FILES[content]

    def read(value: object, field: str) -> bytes:
        if isinstance(value, bytes):
            return value
        if not value or not isinstance(value, str):
            article = "a" if kind == "video" else "an"
            raise RequestError(field, f"expected {article} {kind} in base64")
        if value.lower().startswith(("http://", "https://")):
            raise RequestError(
                field, f"addresses are not fetched; send the {kind} itself, in base64"
            )
        try:
            return base64.b64decode(_DATA_URI.sub("", value, count=1), validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(field, "is not base64") from None

    return read


_image = _file("image")


def _images(value: object, field: str) -> list[object]:
    given = _list(value, field, "images in base64")
    if len(given) > MAX_IMAGES:
        raise RequestError(field, f"at most {MAX_IMAGES} images belong to an input")
    return [_image(each, f"{field}[{at}]") for at, each in enumerate(given)]


def _table(value: object, field: str) -> Mapping[str, list[str]]:
    """Columns by their names, of equally many cells; numbers become the texts that models read."""
    columns = {
        name: [_cell(each, f"{field}.{name}[{at}]") for at, each in enumerate(cells)]
        for name, column in _object(value, field).items()
        for cells in [_list(column, f"{field}.{name}", "cells")]
    }
    if len({len(cells) for cells in columns.values()}) > 1:
        raise RequestError(field, "its columns differ in length")
    return columns


def _cell(value: object, field: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RequestError(field, "expected a text or a number")
    return str(value)


def _word_boxes(value: object, field: str) -> object:
    return _converted(_list(value, field, "words with their boxes"), list[_WordBox], field)


def _messages(value: object, field: str) -> list[_Object]:
    """Each with a list of parts; an image part has the bytes of its file."""
    given = _converted(_list(value, field, "messages"), list[_Message], field)
    messages: list[_Object] = []
    for at, each in enumerate(given):
        parts = [_TextPart(each.content)] if isinstance(each.content, str) else each.content
        place = f"{field}[{at}].content"
        read = [_part(part, f"{place}[{number}]") for number, part in enumerate(parts)]
        messages.append({"role": each.role, "content": read})
    num_images = sum("image" in part for each in messages for part in _parts(each))
    if num_images > MAX_IMAGES:
        raise RequestError(field, f"at most {MAX_IMAGES} images belong to an input")
    return messages


def _parts(message: _Object) -> list[_Object]:
    return cast(list[_Object], message["content"])


def _part(part: _Part, field: str) -> _Object:
    """As transformers' processors want it."""
    match part:
        case _TextPart(text):
            return {"type": "text", "text": text}
        case _ImagePart(image):
            return {"type": "image", "image": _image(image, f"{field}.image")}
        case _ImageUrlPart(image_url):
            return {"type": "image", "image": _image(image_url.url, f"{field}.image_url.url")}


def _converted(value: object, kind: type[T], field: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        raise RequestError(field + place.removesuffix("`"), said) from None


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
