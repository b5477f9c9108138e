"""AWS's framing of streams, `application/vnd.amazon.eventstream`.

```
| total length | length of headers | CRC of these 8 bytes | headers | payload | CRC of all before |
```

Numbers are unsigned, of 32 bits, the highest byte first.
"""

from __future__ import annotations

import struct
import zlib

MIMETYPE = "application/vnd.amazon.eventstream"

_TEXT_VALUE = 7
_BESIDE_CONTENT = 16
"""Bytes of a frame besides headers and payload."""


def payload_part(payload: bytes) -> bytes:
    """A frame with a part of the model's answer, as SageMaker streams it."""
    headers = b"".join(
        _header(name, value)
        for name, value in (
            (b":event-type", b"PayloadPart"),
            (b":content-type", b"application/octet-stream"),
            (b":message-type", b"event"),
        )
    )
    lengths = struct.pack(">II", _BESIDE_CONTENT + len(headers) + len(payload), len(headers))
    frame = lengths + _checksum(lengths) + headers + payload
    return frame + _checksum(frame)


def _header(name: bytes, value: bytes) -> bytes:
    return struct.pack(">B", len(name)) + name + struct.pack(">BH", _TEXT_VALUE, len(value)) + value


def _checksum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))
