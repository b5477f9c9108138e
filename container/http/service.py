"""The base of all services: the engine's client, the options, and waiting for replies."""

from __future__ import annotations

import time
from collections.abc import Generator

import msgspec
from flask import Response

from container.http.deadline import Deadline
from container.http.request_context import RequestContext
from container.http.route import Contract
from container.wire.engine_client import EngineClient
from container.wire.reply import Reply
from core.configuration.options import Options
from core.errors import GenerationError, NotFoundError
from core.protocol.messages import Performed


class Service:
    """The engine client, options and model name that every API uses. One per front-end worker."""

    def __init__(
        self, client: EngineClient, options: Options, model_name: str, contract: Contract
    ) -> None:
        """contract: the routes of the worker's application, and what /invocations means."""
        self.client = client
        self.options = options
        self.model_name = model_name
        self.contract = contract
        self.started = int(time.time())
        """In seconds since 1970."""

    def require_model(self, name: str) -> None:
        """Raise NotFoundError unless this is the model's name."""
        if name != self.model_name:
            raise NotFoundError(f"no model '{name}'; this container serves '{self.model_name}'")

    def wait_for(self, context: RequestContext, reply: Reply) -> Performed:
        """Return the only part of a reply. Raises what `parts_of` raises."""
        (part,) = self.parts_of(context, reply)
        return part

    def parts_of(self, context: RequestContext, reply: Reply) -> Generator[Performed]:
        """Yield the parts of a reply as they arrive, up to and including the last.

        Raises what `Reply.get` and `Deadline.wait` raise. If the generator raises or is
        closed early, the request is aborted in the engine.
        """
        deadline = Deadline(context.has_hung_up, self.options.server.predict_timeout)
        try:
            while True:
                part = deadline.wait(reply.get)
                yield part
                if part.is_last:
                    return
        except GenerationError:  # after the deadline, or if the request failed and so has ended
            reply.abort("timeout")
            raise
        finally:
            reply.abort()


def json_response(body: object) -> Response:
    """Return a JSON response. A str must be JSON already; anything else is encoded as one line.

    That line ends with a newline, because AWS's `LineIterator` reads until a newline.
    """
    if isinstance(body, str):
        return Response(body, mimetype="application/json")
    return Response(msgspec.json.encode(body) + b"\n", mimetype="application/json")
