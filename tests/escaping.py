"""What foreign code may raise besides an Exception."""

from __future__ import annotations

import asyncio


class PanicException(BaseException):
    """Like that of PyO3, which raises it for a panic of Rust. No module exports it."""


ESCAPING = (PanicException, asyncio.CancelledError, SystemExit, GeneratorExit)
