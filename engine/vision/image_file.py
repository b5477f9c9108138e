"""Decodes image files."""

from __future__ import annotations

import io
import struct
from typing import Any

from core.errors import RequestError

BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, struct.error)
"""Exceptions that Pillow raises for broken files."""


def read_image(
    data: object, field: str, max_pixels: int, formats: tuple[str, ...] | None = None
) -> Any:
    """Decode an image file to RGB, rotated as its EXIF data says.

    formats: Pillow's names of the formats to accept; None: all that it knows.

    Raises RequestError if it is not such an image or too large.
    """
    from PIL import Image  # an extra, see pyproject.toml

    if not isinstance(data, bytes):  # a str would be a path
        raise RequestError(field, "expected the bytes of an image")
    try:
        image = Image.open(io.BytesIO(data), formats=formats)  # reads the header only
        if image.width * image.height <= max_pixels:
            return _upright(image).convert("RGB")
    except (Image.DecompressionBombError, *BROKEN):
        known = " or ".join(formats or ("a known format",))
        raise RequestError(field, f"is not an image in {known}, or is truncated") from None
    raise RequestError(field, f"has more than {max_pixels} pixels; send a smaller image")


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    image.load()  # raises if its pixels are broken; later errors concern its EXIF data
    try:
        return ImageOps.exif_transpose(image)
    except BROKEN:  # viewers ignore EXIF data that is broken
        return image
