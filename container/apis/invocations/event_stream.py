"""The AWS event stream encoding, `application/vnd.amazon.eventstream`.

```
| total length | headers length | CRC of these 8 bytes | headers | payload | CRC of all the above |
```

Lengths and CRCs are unsigned 32-bit integers, big-endian.
"""

from __future__ import annotations

import struct
import zlib

MIMETYPE = "application/vnd.amazon.eventstream"

_STRING_VALUE_TYPE = 7
_OVERHEAD_BYTES = 16
"""Bytes of a frame in addition to its headers and payload."""


def payload_part(payload: bytes) -> bytes:
    """Return a PayloadPart frame, in which SageMaker streams a part of the response body."""
    headers = b"".join(
        _header(name, value)
        for name, value in (
            (b":event-type", b"PayloadPart"),
            (b":content-type", b"application/octet-stream"),
            (b":message-type", b"event"),
        )
    )
    lengths = struct.pack(">II", _OVERHEAD_BYTES + len(headers) + len(payload), len(headers))
    frame = lengths + _checksum(lengths) + headers + payload
    return frame + _checksum(frame)


def _header(name: bytes, value: bytes) -> bytes:
    return (
        struct.pack(">B", len(name))
        + name
        + struct.pack(">BH", _STRING_VALUE_TYPE, len(value))
        + value
    )


def _checksum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))
