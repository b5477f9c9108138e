"""The API keys of `option.api_keys_file`: one key a line, with an optional name and limits.

```
# KEY [name=NAME] [requests_per_minute=N] [tokens_per_minute=N]
6f1c0a0e9d7b4c5f name=batch requests_per_minute=60 tokens_per_minute=20000
```

A word that begins with `#` starts a comment. Neither a message nor a log line ever holds a key,
and only its SHA-256 digest stays in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from core.configuration.options import ServerOptions
from core.errors import ConfigurationError

_LIMITS = ("requests_per_minute", "tokens_per_minute")
_FORMAT = "KEY [name=NAME] [requests_per_minute=N] [tokens_per_minute=N]"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, by its digest. A limit of None means unlimited."""

    digest: bytes
    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


def configured_keys(server: ServerOptions) -> tuple[ApiKey, ...] | None:
    """Return the keys of `option.api_keys_file`; None without that option.

    Raises ConfigurationError as `read_api_keys` does.
    """
    return None if server.api_keys_file is None else read_api_keys(Path(server.api_keys_file))


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file, in the order of its lines.

    Raises ConfigurationError if the file cannot be read, has no key, or has an invalid line.
    """
    origin = f"option.api_keys_file={path}"
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"{origin}: cannot be read: {reason}") from None
    keys = [
        _read_line(words, f"{origin}, line {number}")
        for number, line in enumerate(lines, 1)
        if (words := list(takewhile(lambda word: not word.startswith("#"), line.split())))
    ]
    if not keys:
        raise ConfigurationError(f"{origin}: has no key; write one key per line: {_FORMAT}")
    for fields, what in (([key.digest for key in keys], "key"), ([k.name for k in keys], "name")):
        if len(set(fields)) < len(fields):
            raise ConfigurationError(f"{origin}: the same {what} is in two lines; remove one")
    return tuple(keys)


def find_api_key(keys: Sequence[ApiKey], given: str) -> int | None:
    """Return the index of the key that a client sent, or None.

    The time depends neither on which key matches nor on how many characters of a key match.
    """
    digest, found = _digest(given), None
    for index, key in enumerate(keys):
        if hmac.compare_digest(digest, key.digest):
            found = index
    return found


def _read_line(words: Sequence[str], origin: str) -> ApiKey:
    if not re.fullmatch("[!-~]+", words[0]):
        raise ConfigurationError(f"{origin}: a key may have only printable ASCII characters")
    settings: dict[str, str] = {}
    for position, word in enumerate(words[1:], 2):
        name, equals, value = word.partition("=")
        if not equals or name not in ("name", *_LIMITS) or name in settings or not value:
            # The word itself may be a second key, so it is not repeated here.
            raise ConfigurationError(f"{origin}: word {position} is invalid; expected {_FORMAT}")
        settings[name] = value
    limits = [_read_limit(name, settings[name], origin) if name in settings else None
              for name in _LIMITS]  # fmt: skip
    digest = _digest(words[0])
    return ApiKey(digest, settings.get("name", digest.hex()[:8]), *limits)


def _read_limit(name: str, text: str, origin: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ConfigurationError(f"{origin}: {name}={text}: expected an integer of at least 1")
    return int(text)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
