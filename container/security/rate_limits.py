"""Limits per minute of each API key, as token buckets that all worker processes share."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from container.security.api_keys import ApiKey
from core.errors import RateLimitError

_REQUESTS, _TOKENS = 0, 1
_NUM_BUCKETS = 2
_DOUBLE = 8


class RateLimits:
    """The buckets of all keys: full at first, with room for one minute, refilled continuously.

    A request takes one from its key's bucket of requests before it starts. Tokens are taken as they
    are computed, because the length of an answer is not known earlier. So the request that empties
    the bucket of tokens runs to its end, and later requests are refused until the debt is paid.

    Create it before the workers are forked: the levels are in a file in memory that all workers
    map, and a lock on that file guards them. The kernel releases the lock of a process that dies.
    """

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` must agree among processes, as CLOCK_MONOTONIC does."""
        self._keys = keys
        self._clock = clock
        self._file = os.memfd_create("rate-limits")
        weakref.finalize(self, os.close, self._file)
        os.truncate(self._file, _NUM_BUCKETS * 2 * _DOUBLE * len(keys))
        self._cells = memoryview(mmap.mmap(self._file, 0)).cast("d")
        for index, key in enumerate(keys):
            for bucket in (_REQUESTS, _TOKENS):
                self._write(index, bucket, float(_limit(key, bucket) or 0))

    def admit(self, index: int) -> None:
        """Count a request of the key `index`. Raises RateLimitError if a bucket is empty."""
        key = self._keys[index]
        with self._locked():
            requests, tokens = self._level(index, _REQUESTS), self._level(index, _TOKENS)
            if key.tokens_per_minute is not None and tokens <= 0:
                wait_s = (1 - tokens) * 60 / key.tokens_per_minute
                raise _exceeded(key, "tokens_per_minute", key.tokens_per_minute, wait_s)
            if key.requests_per_minute is not None:
                if requests < 1:
                    wait_s = (1 - requests) * 60 / key.requests_per_minute
                    raise _exceeded(key, "requests_per_minute", key.requests_per_minute, wait_s)
                self._write(index, _REQUESTS, requests - 1)

    def charge(self, index: int, num_tokens: int) -> None:
        """Take tokens that a request of the key `index` has used."""
        if self._keys[index].tokens_per_minute is not None:
            with self._locked():
                self._write(index, _TOKENS, self._level(index, _TOKENS) - num_tokens)

    @contextmanager
    def _locked(self) -> Generator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _level(self, index: int, bucket: int) -> float:
        """Return the bucket's level now. It is negative while the bucket is in debt."""
        limit, at = _limit(self._keys[index], bucket) or 0, _cell(index, bucket)
        level, written_at = self._cells[at], self._cells[at + 1]
        return min(limit, level + (self._clock() - written_at) * limit / 60)

    def _write(self, index: int, bucket: int, level: float) -> None:
        at = _cell(index, bucket)
        self._cells[at], self._cells[at + 1] = level, self._clock()


def _cell(index: int, bucket: int) -> int:
    """Return the position of a bucket's level; the time of its last change follows."""
    return 2 * (index * _NUM_BUCKETS + bucket)


def _limit(key: ApiKey, bucket: int) -> int | None:
    return key.requests_per_minute if bucket == _REQUESTS else key.tokens_per_minute


def _exceeded(key: ApiKey, name: str, limit: int, wait_s: float) -> RateLimitError:
    seconds = max(1, math.ceil(wait_s))
    return RateLimitError(
        f"the key '{key.name}' has used up its {name}={limit}; try again in {seconds} s", seconds
    )
