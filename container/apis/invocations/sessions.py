"""Requests that open, use and close SageMaker's sessions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from flask import Response, g, request

from container.apis.invocations.session_store import SESSION_HEADER, Sessions
from container.http.host import json_response
from core.errors import RequestError
from core.options import Options

_NEW = "NEW_SESSION"
_CLOSE = "CLOSE"


class SessionRequests:
    """Looks at each request before it is answered."""

    def __init__(self, options: Options) -> None:
        self._sessions = (
            Sessions(Path(options.sessions_path), options.sessions_expiration)
            if options.enable_stateful_sessions
            else None
        )

    def answer(self, body: Mapping[str, object]) -> Response | None:
        """The answer, where the request was about a session and nothing else."""
        given, wanted = request.headers.get(SESSION_HEADER), body.get("requestType")
        if self._sessions is None:
            if given == _NEW or wanted is not None:
                field = "requestType" if wanted is not None else SESSION_HEADER
                raise RequestError(field, "needs option.enable_stateful_sessions=true")
            return None
        if wanted not in (None, _NEW, _CLOSE):
            raise RequestError("requestType", f"expected {_NEW} or {_CLOSE}")
        if wanted is not None and len(body) > 1:
            raise RequestError("requestType", "goes alone; what else is asked is another request")
        if wanted == _CLOSE:
            return self._closed(self._sessions, given)
        if _NEW in (wanted, given):
            id = self._opened(self._sessions)
            return json_response({"session_id": id}) if wanted else None
        if given is not None:
            self._sessions.use(given)
        return None

    def _opened(self, sessions: Sessions) -> str:
        id, end = sessions.open()
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))
        g.headers["X-Amzn-SageMaker-New-Session-Id"] = f"{id}; Expires={expires}"
        return id

    def _closed(self, sessions: Sessions, id: str | None) -> Response:
        if id is None:
            raise RequestError(SESSION_HEADER, f"{_CLOSE} needs the id of the session")
        sessions.close(id)
        g.headers["X-Amzn-SageMaker-Closed-Session-Id"] = id
        return json_response({"session_id": id})
