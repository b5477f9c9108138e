"""The images of a conversation, as the APIs send them and as the chat template sees them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from container.schema.kinds import Schema, object_schema
from core.configuration.limits import IMAGE_BYTES, IMAGES
from core.errors import RequestError
from core.images import ImageFile

Part = dict[str, str]
"""A part of a message's content, for the template: a text, or the place of an image."""

IMAGES_NOT_ALLOWED = "only messages of the user and results of tools may have images"
_DATA_URL = re.compile("data:image/(png|jpe?g|webp);base64,", re.IGNORECASE)
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
_EXPECTED = "a PNG, JPEG or WebP image as data:image/png;base64,..."
URL: Schema = {"type": "string", "pattern": "^data:image/"}
BASE64_SOURCE = object_schema(
    {
        "type": {"const": "base64"},
        "media_type": {"enum": list(_MEDIA_TYPES)},
        "data": {"type": "string"},
    }
)


class Images:
    """Collects the images of a conversation, in the order of its messages, without decoding them.

    Its methods return the image's part for the template. They raise RequestError if there are more
    than IMAGES, or if one is not a PNG, JPEG or WebP file in base64 of at most IMAGE_BYTES.
    """

    def __init__(self, field: str) -> None:
        """field: the request's field that holds the conversation, for errors."""
        self._field = field
        self._files: list[ImageFile] = []

    @property
    def files(self) -> tuple[ImageFile, ...]:
        return tuple(self._files)

    def add_url(self, url: object, field: str) -> Part:
        """Add the image that a `data:` URL contains. Other URLs are refused, not fetched."""
        if not isinstance(url, str):
            raise RequestError(field, f"expected {_EXPECTED}")
        if url[:8].lower().startswith(("http://", "https://")):
            raise RequestError(field, f"addresses are not fetched; send {_EXPECTED}")
        head = _DATA_URL.match(url)
        if head is None:
            raise RequestError(field, f"expected {_EXPECTED}")
        return self._add(url[head.end() :], field)

    def add_base64(self, media_type: str, data: str, field: str) -> Part:
        """Add an image in base64. field: the field with `media_type` and `data`, for errors."""
        if media_type not in _MEDIA_TYPES:
            raise RequestError(f"{field}.media_type", f"expected one of {', '.join(_MEDIA_TYPES)}")
        return self._add(data, f"{field}.data")

    def _add(self, data: str, field: str) -> Part:
        IMAGES.check(self._field, len(self._files) + 1)
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
