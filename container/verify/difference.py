"""Where two responses to the same request differ, if they do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import cast

Record = Mapping[str, object]

_OF_ONE_RESPONSE = {
    "created", "created_at", "completed_at", "model", "receipt", "system_fingerprint", "timings"
}  # fmt: skip
"""Fields that no two responses share, or that name the model. So is an `id` that is a text."""
_TOKEN = re.compile(r"(?:\.tokens|_tokens|token_ids|logprobs(?:\.content)?|\.prefill)\[(\d+)\]")
_NO_TOKEN = 2**31
PARTS = (
    "the weights", "the quantization", "the dtype", "the dtype of K and V", "the instruction set",
    "the code", "the number of processes", "the variant of the model",
)  # fmt: skip
"""What the parts of a digest tell apart, in order (`core.protocol.facts.Facts.digest`)."""


def first_difference(logged: object, computed: object) -> str | None:
    """Return where the responses differ first, and how; None if they are equal.

    The earliest token that differs comes first, wherever its response has it.
    """
    found = list(_differences(logged, computed, ""))
    if not found:
        return None
    path, values = min(found, key=lambda difference: _token_of(difference[0]))
    token = "" if _token_of(path) == _NO_TOKEN else f"token {_token_of(path) + 1}: "
    return f"{token}{path.removeprefix('.')}{values}"


def digest_difference(logged: str, computed: str) -> str:
    """Return what two digests that differ tell apart."""
    parts = zip_longest(logged.split("."), computed.split("."), fillvalue="none")
    pairs = zip(PARTS, parts, strict=False)
    return ", ".join(f"{what} ({a} then, {b} here)" for what, (a, b) in pairs if a != b)


def _token_of(path: str) -> int:
    match = _TOKEN.search(path)
    return int(match[1]) if match else _NO_TOKEN


def _differences(logged: object, computed: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each value that differs, and both values."""
    match logged, computed:
        case dict(), dict():
            one, other = cast(Record, logged), cast(Record, computed)
            for key in {**one, **other}:
                is_id = key == "id" and isinstance(one.get(key), str)
                if not is_id and key not in _OF_ONE_RESPONSE:
                    yield from _differences(one.get(key), other.get(key), f"{path}.{key}")
        case list(), list():
            pairs = zip_longest(cast(list[object], logged), cast(list[object], computed))
            for index, (a, b) in enumerate(pairs):
                yield from _differences(a, b, f"{path}[{index}]")
        case _:
            if logged != computed:
                yield path, f" was {logged!r}, is {computed!r}"
