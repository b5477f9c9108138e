"""SageMaker's sessions: an id by which an endpoint sends a client to the same container again.

Nothing of a request is kept here. A session is an empty file, so that all workers know it; the
file's time is that of its last use.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from core.errors import OverloadedError, RequestError

SESSION_HEADER = "X-Amzn-SageMaker-Session-Id"
MAX_SESSIONS = 10_000


class Sessions:
    """The open sessions, in a directory of their own."""

    def __init__(
        self, directory: Path, lifetime_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`lifetime_s`: how long a session stays open after its last use."""
        self._directory = directory
        self._lifetime_s = lifetime_s
        self._clock = clock

    def open(self) -> tuple[str, float]:
        """A new session's id, and when it ends, in seconds since 1970.

        Raises OverloadedError where too many are open.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(1 for _ in self._living()) >= MAX_SESSIONS:
            raise OverloadedError(f"{MAX_SESSIONS} sessions are open")
        id = uuid.uuid4().hex
        return id, self._touch(self._directory / id)

    def use(self, id: str) -> None:
        """Keeps a session open. Raises RequestError where there is none of this id."""
        self._touch(self._path(id))

    def close(self, id: str) -> None:
        """Ends a session. Raises RequestError where there is none of this id."""
        self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        path = self._directory / id
        if not re.fullmatch("[0-9a-f]{32}", id) or not self._is_living(path):
            raise RequestError(SESSION_HEADER, "no such session, or no longer; open a new one")
        return path

    def _living(self) -> Iterator[Path]:
        """The open sessions; the others go."""
        for path in self._directory.iterdir():
            if self._is_living(path):
                yield path
            else:
                path.unlink(missing_ok=True)

    def _is_living(self, path: Path) -> bool:
        with suppress(FileNotFoundError):
            return path.stat().st_mtime + self._lifetime_s > self._clock()
        return False

    def _touch(self, path: Path) -> float:
        now = self._clock()
        path.touch()
        os.utime(path, (now, now))
        return now + self._lifetime_s
