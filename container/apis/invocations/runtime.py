"""The routes of the SageMaker runtime API, which AWS puts in front of a container.

With option.local_runtime_api, `boto3.client("sagemaker-runtime",
endpoint_url="http://localhost:8080")` works without AWS. Request signatures are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from flask import Flask, Response, current_app

from container.apis.invocations.api import Invocations
from container.http.event_stream import MIMETYPE, payload_part

_VARIANT = "AllTraffic"


class RuntimeRoutes:
    """The routes of the runtime API; every endpoint name leads to this container's model."""

    def __init__(self, invocations: Invocations) -> None:
        self._invocations = invocations

    def add_to(self, app: Flask) -> None:
        path = "/endpoints/<name>/invocations"
        app.add_url_rule(path, view_func=self.invoke_endpoint, methods=["POST"])
        app.add_url_rule(
            f"{path}-response-stream",
            view_func=self.invoke_endpoint_with_response_stream,
            methods=["POST"],
        )

    def invoke_endpoint(self, name: str) -> Response:
        return self._answer("Accept")

    def invoke_endpoint_with_response_stream(self, name: str) -> Response:
        """Handle InvokeEndpointWithResponseStream, which frames the response as events."""
        response = self._answer("X-Amzn-SageMaker-Accept")
        if response.status_code != 200:
            return response
        framed = Response(_frames(response), content_type=MIMETYPE)
        framed.headers["X-Amzn-SageMaker-Content-Type"] = response.content_type
        framed.headers["X-Amzn-Invoked-Production-Variant"] = _VARIANT
        framed.call_on_close(response.close)
        return framed

    def _answer(self, accept_header: str) -> Response:
        """Return the container's response; an error becomes the runtime's ModelError."""
        try:
            response = self._invocations.invoke(accept_header)
        except Exception as error:
            response = current_app.make_response(current_app.handle_user_exception(error))
        if response.status_code != 200:
            return _model_error(response)
        response.headers["X-Amzn-Invoked-Production-Variant"] = _VARIANT
        return response


def _frames(response: Response) -> Iterator[bytes]:
    for part in response.iter_encoded():
        if part:
            yield payload_part(part)


def _model_error(response: Response) -> Response:
    status, message = response.status_code, response.get_data(as_text=True)
    origin = "client" if status < 500 else "server"
    body = {
        "ErrorCode": f"{origin.upper()}_ERROR_FROM_MODEL",
        "Message": f"Received {origin} error ({status}) from primary with message {message}",
        "OriginalMessage": message,
        "OriginalStatusCode": status,
        "LogStreamArn": "",
    }
    error = Response(msgspec.json.encode(body), 424, mimetype="application/json")
    error.headers["X-Amzn-ErrorType"] = "ModelError"
    return error
