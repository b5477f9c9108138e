"""SageMaker's sessions: SageMaker sends all requests of a session to the same container.

Each session is an empty file, so that all workers see it, and the file's modification time is the
time of the session's last use. The container keeps nothing else. The session's id decides which
engine answers its requests (`EngineClient`). The directory may hold files of other programs, such
as /dev/shm does. They are neither counted nor deleted.
"""

from __future__ import annotations

import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from flask import Response

from container.http.request_context import SESSION_HEADER, RequestContext
from container.http.service import json_response
from core.configuration.options import ServerOptions
from core.errors import OverloadedError, RequestError

MAX_SESSIONS = 10_000

_ID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""The ids that `uuid.uuid4` makes, which are the names of the files."""
_NEW = "NEW_SESSION"
_CLOSE = "CLOSE"


class Sessions:
    """The open sessions, each a file of a directory."""

    def __init__(
        self,
        directory: Path,
        lifetime_s: float,
        clock: Callable[[], float] = time.time,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        """A session expires `lifetime_s` seconds after its last use."""
        self._directory = directory
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._max_sessions = max_sessions

    def open(self) -> tuple[str, float]:
        """Open a session and return its id and its expiry, in seconds since 1970.

        Raises OverloadedError if `max_sessions` are open.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if sum(1 for _ in self._open_files()) >= self._max_sessions:
            raise OverloadedError(f"{self._max_sessions} sessions are open")
        id = str(uuid.uuid4())
        return id, self._touch(self._directory / id)

    def use(self, id: str) -> None:
        """Restart a session's lifetime. Raises RequestError if no session has this id."""
        self._touch(self._path(id))

    def close(self, id: str) -> None:
        """Close a session. Raises RequestError if no session has this id."""
        self._path(id).unlink(missing_ok=True)

    def _path(self, id: str) -> Path:
        path = self._directory / id
        if not _ID.fullmatch(id) or not self._is_open(_status(path)):
            raise RequestError(SESSION_HEADER, "no such session, or it has expired; open a new one")
        return path

    def _open_files(self) -> Iterator[Path]:
        """Yield the files of open sessions and delete the files of expired sessions."""
        for path in self._directory.iterdir():
            status = _status(path) if _ID.fullmatch(path.name) else None
            if self._is_open(status):
                yield path
            elif status is not None:
                path.unlink(missing_ok=True)

    def _is_open(self, status: os.stat_result | None) -> bool:
        return status is not None and status.st_mtime + self._lifetime_s > self._clock()

    def _touch(self, path: Path) -> float:
        now = self._clock()
        path.touch()
        os.utime(path, (now, now))
        return now + self._lifetime_s


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a session's file, or None if it is no empty regular file."""
    with suppress(FileNotFoundError):
        status = path.lstat()
        return status if stat.S_ISREG(status.st_mode) and not status.st_size else None
    return None


def session_answer(
    server: ServerOptions, context: RequestContext, body: Mapping[str, object]
) -> Response | None:
    """Open, use or close a session if a request to /invocations says so.

    Returns the response to a request that does only that, and None for a request that the API
    still has to answer. Raises RequestError if the request is invalid or sessions are disabled.
    """
    header, request_type = context.headers.get(SESSION_HEADER), body.get("requestType")
    if header is None and request_type is None:
        return None
    return _answer(server, context, header, request_type, is_alone=len(body) == 1)


def _answer(
    server: ServerOptions,
    context: RequestContext,
    header: str | None,
    request_type: object,
    *,
    is_alone: bool,
) -> Response | None:
    """is_alone: whether the body has no field but `requestType`."""
    if not server.enable_stateful_sessions:
        field = SESSION_HEADER if request_type is None else "requestType"
        raise RequestError(
            field, "stateful sessions are not enabled; set option.enable_stateful_sessions=true"
        )
    sessions = Sessions(Path(server.sessions_path), server.sessions_expiration)
    if request_type not in (None, _NEW, _CLOSE):
        raise RequestError("requestType", f"expected {_NEW} or {_CLOSE}")
    if request_type is not None and not is_alone:
        raise RequestError("requestType", "must be the only field of the body")
    if request_type == _CLOSE:
        return _close(context, sessions, header)
    if _NEW in (request_type, header):
        id, expiry = sessions.open()
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expiry))
        context.response_headers["X-Amzn-SageMaker-New-Session-Id"] = f"{id}; Expires={expires}"
        context.response_headers[SESSION_HEADER] = id  # where DJL's client looks for it
        return json_response({"session_id": id}) if request_type else None
    if header is not None:
        sessions.use(header)
    return None


def _close(context: RequestContext, sessions: Sessions, id: str | None) -> Response:
    if id is None:
        raise RequestError(SESSION_HEADER, f"{_CLOSE} needs the id of the session")
    sessions.close(id)
    context.response_headers["X-Amzn-SageMaker-Closed-Session-Id"] = id
    return json_response({"session_id": id})
