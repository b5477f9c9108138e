"""What every API does alike, whatever the container serves: take in a request's body."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence

import msgspec
from flask import Response, abort, g, request

from container.http.disconnect import disconnect_check
from container.http.patience import Patience
from container.schema.body import is_json_type, is_served_type, read_body
from container.wire.engine_client import EngineClient
from container.wire.task_reply import TaskReply
from core.messages import Performed
from core.options import Options

logger = logging.getLogger(__name__)


class Host:
    """Works on the current request of Flask."""

    def __init__(self, client: EngineClient, options: Options, model_name: str) -> None:
        self.client = client
        self.options = options
        self.model_name = model_name

    def read_json(self) -> dict[str, object]:
        """The fields of a body that must be JSON."""
        if not is_json_type(request.mimetype):
            abort(415, f"Content-Type {request.mimetype}: send application/json")
        return read_body(self.data(), request.mimetype)

    def read(self) -> dict[str, object]:
        """The fields of a body of any served type."""
        if not is_served_type(request.mimetype):
            abort(
                415,
                f"Content-Type {request.mimetype}: send application/json, text/plain or text/csv",
            )
        return read_body(self.data(), request.mimetype)

    def data(self) -> bytes:
        """The body as it came."""
        body = request.get_data()
        if request.content_length is None and len(body) >= self.options.max_request_size:
            abort(413)  # a chunked body is cut there without a word
        return body

    def wait_for(self, reply: TaskReply) -> Performed:
        """The engine's answer, of one part. Raises what `parts_of` raises."""
        (answer,) = self.parts_of(reply)
        return answer

    def parts_of(self, reply: TaskReply) -> Generator[Performed]:
        """The parts of the engine's answer as they come, up to the one that is last.

        Raises what `TaskReply.get` raises, and what `Patience.wait` does. However it ends, also by
        being closed, the engine has then forgotten the request.
        """
        patience = Patience(disconnect_check(request.environ), self.options.predict_timeout)
        try:
            while True:
                part = patience.wait(reply.get)
                yield part
                if part.is_last:
                    return
        finally:
            reply.abort()

    def warn(self, warnings: Sequence[str]) -> None:
        """Says in the log and in a header what of the request was passed over."""
        for warning in warnings:
            logger.warning("request=%s event=passed_over reason=%r", g.request_id, warning)
        if warnings:
            g.headers["X-Longshore-Warning"] = "; ".join(warnings)


def json_response(body: object) -> Response:
    """Of a text that is JSON already, or of what is to become it."""
    if isinstance(body, str):
        return Response(body, mimetype="application/json")
    return Response(msgspec.json.encode(body), mimetype="application/json")
