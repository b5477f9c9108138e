"""The images in messages, as the APIs send them and as the chat template sees them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from container.schema.kinds import Schema, object_schema
from core.configuration.limits import IMAGE_BYTES, IMAGES
from core.errors import RequestError
from core.images import NO_IMAGES, ImageFile, ReadImages
from core.protocol.facts import Facts

Part = dict[str, str]
"""A part of a message's content, for the template: a text, or the place of an image."""
Base64 = tuple[str, str]
"""An image in base64, and the request's field that holds it."""

_NOT_ALLOWED = "only messages of the user and results of tools may have images"
_DATA_URL = re.compile("data:image/(png|jpe?g|webp);base64,", re.IGNORECASE)
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
_EXPECTED = "a PNG, JPEG or WebP image as data:image/png;base64,..."
_URL: Schema = {"type": "string", "pattern": "^data:image/"}


@dataclass(frozen=True, slots=True)
class MediaForm:
    """How an API writes an image as a part of a message's content."""

    type: str
    fields: Mapping[str, Schema]
    read: Callable[[Mapping[str, Any], str], Base64 | None]
    """Reads a part of this type, in the field of this name. None if it is incomplete."""
    help: str

    @property
    def schema(self) -> Schema:
        return object_schema({"type": {"const": self.type}, **self.fields})


class Media:
    """Collects the images of a conversation in the order of its messages, without decoding them."""

    def __init__(self, field: str, form: MediaForm, *, allowed: bool = True) -> None:
        """field: the request's field that holds the conversation, for errors."""
        self.field, self.form, self.allowed = field, form, allowed
        self._files: list[ImageFile] = []
        """In the order of the parts of type `image` that the template sees."""

    def __bool__(self) -> bool:
        """Whether the conversation has images."""
        return bool(self._files)

    def check(self, facts: Callable[[], Facts]) -> None:
        """Raise RequestError if there are images, but the model takes none."""
        if self._files and not facts().takes_images:
            raise RequestError(self._files[0].field, NO_IMAGES)

    def job(self, prompt: str, *, add_special_tokens: bool) -> ReadImages:
        """Return the job that encodes the rendered conversation with its images."""
        return ReadImages(prompt, tuple(self._files), add_special_tokens)

    def only(self, allowed: bool) -> Media:
        """Return this collection if `allowed`, or else one that refuses every image."""
        return self if allowed else Media(self.field, self.form, allowed=False)

    def part(self, part: object, field: str) -> Part | None:
        """Add an image and return its part for the template; None if `part` is something else.

        Raises RequestError if there are more than IMAGES, or if one is not allowed here or not a
        PNG, JPEG or WebP file in base64 of at most IMAGE_BYTES.
        """
        match part:
            case {"type": self.form.type} if self.allowed:
                found = self.form.read(cast(Mapping[str, Any], part), field)
            case {"type": self.form.type}:
                raise RequestError(f"{field}.type", _NOT_ALLOWED)
            case _:
                found = None
        return None if found is None else self._add(*found)

    def _add(self, data: str, field: str) -> Part:
        IMAGES.check(self.field, len(self._files) + 1)
        IMAGE_BYTES.check(field, len(data) // 4 * 3)
        try:
            decoded = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(field, "is not valid base64") from None
        self._files.append(ImageFile(field, decoded))
        return {"type": "image"}


def text_part(text: str) -> Part:
    """Return a text's part for the template."""
    return {"type": "text", "text": text}


def content_of(parts: Sequence[Part]) -> str | list[Part]:
    """Return a message's content for the template: one text, unless there are images."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return list(parts)


def _in_url(url: object, field: str) -> Base64:
    """Return the image that a `data:` URL contains. Other URLs are refused, not fetched."""
    if not isinstance(url, str):
        raise RequestError(field, f"expected {_EXPECTED}")
    if url[:8].lower().startswith(("http://", "https://")):
        raise RequestError(field, f"addresses are not fetched; send {_EXPECTED}")
    head = _DATA_URL.match(url)
    if head is None:
        raise RequestError(field, f"expected {_EXPECTED}")
    return url[head.end() :], field


def _in_chat(part: Mapping[str, Any], field: str) -> Base64:
    match part:
        case {"image_url": {"url": str(url)}}:
            return _in_url(url, f"{field}.image_url.url")
        case _:
            return _in_url(None, f"{field}.image_url.url")


def _in_input(part: Mapping[str, Any], field: str) -> Base64:
    if not isinstance(part.get("image_url"), str):
        raise RequestError(f"{field}.image_url", "expected a data: URL; no files are stored")
    return _in_url(part["image_url"], f"{field}.image_url")


def _in_block(block: Mapping[str, Any], field: str) -> Base64 | None:
    field = f"{field}.source"
    match block.get("source"):
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            if media_type not in _MEDIA_TYPES:
                expected = f"expected one of {', '.join(_MEDIA_TYPES)}"
                raise RequestError(f"{field}.media_type", expected)
            return data, f"{field}.data"
        case {"type": "url", **source}:
            return _in_url(source.get("url"), f"{field}.url")
        case dict():
            raise RequestError(field, "expected the type base64, media_type and data")
        case _:
            return None


_SOURCE = object_schema(
    {
        "type": {"const": "base64"},
        "media_type": {"enum": list(_MEDIA_TYPES)},
        "data": {"type": "string"},
    }
)
CHAT_MEDIA = MediaForm(
    "image_url", {"image_url": object_schema({"url": _URL})}, _in_chat,
    "Images must be `data:` URLs.",
)  # fmt: skip
RESPONSES_MEDIA = MediaForm(
    "input_image", {"image_url": _URL}, _in_input, "Images must be `data:` URLs."
)
ANTHROPIC_MEDIA = MediaForm("image", {"source": _SOURCE}, _in_block, "Images are in base64.")
