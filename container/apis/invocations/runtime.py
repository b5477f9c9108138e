"""The routes of SageMaker's runtime, which stands before a container on AWS.

With them `boto3.client("sagemaker-runtime", endpoint_url="http://localhost:8080")` works without
AWS (`option.local_runtime_api`). Nobody checks the signature of a request here.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from flask import Flask, Response, current_app, request

from container.apis.invocations.api import Invocations
from container.http.event_stream import MIMETYPE, payload_part

_VARIANT = "AllTraffic"


class RuntimeRoutes:
    """One model, whatever the name of the endpoint."""

    def __init__(self, invocations: Invocations) -> None:
        self._invocations = invocations

    def add_to(self, app: Flask) -> None:
        """Adds the routes."""
        path = "/endpoints/<name>/invocations"
        app.add_url_rule(path, view_func=self.invoke_endpoint, methods=["POST"])
        app.add_url_rule(
            f"{path}-response-stream",
            view_func=self.invoke_endpoint_with_response_stream,
            methods=["POST"],
        )

    def invoke_endpoint(self, name: str) -> Response:
        """InvokeEndpoint."""
        return self._answer(request.headers.get("Accept"))

    def invoke_endpoint_with_response_stream(self, name: str) -> Response:
        """InvokeEndpointWithResponseStream: the answer in frames."""
        answer = self._answer(request.headers.get("X-Amzn-SageMaker-Accept"))
        if answer.status_code != 200:
            return answer
        framed = Response(_frames(answer), content_type=MIMETYPE)
        framed.headers["X-Amzn-SageMaker-Content-Type"] = answer.content_type
        framed.headers["X-Amzn-Invoked-Production-Variant"] = _VARIANT
        framed.call_on_close(answer.close)
        return framed

    def _answer(self, accept: str | None) -> Response:
        """The container's answer; its errors become the runtime's ModelError."""
        try:
            answer = self._invocations.answer(accept)
        except Exception as error:
            answer = current_app.make_response(current_app.handle_user_exception(error))
        if answer.status_code != 200:
            return _model_error(answer)
        answer.headers["X-Amzn-Invoked-Production-Variant"] = _VARIANT
        return answer


def _frames(answer: Response) -> Iterator[bytes]:
    for part in answer.iter_encoded():
        if part:
            yield payload_part(part)


def _model_error(answer: Response) -> Response:
    status, message = answer.status_code, answer.get_data(as_text=True)
    whose = "client" if status < 500 else "server"
    body = {
        "ErrorCode": f"{whose.upper()}_ERROR_FROM_MODEL",
        "Message": f"Received {whose} error ({status}) from primary with message {message}",
        "OriginalMessage": message,
        "OriginalStatusCode": status,
        "LogStreamArn": "",
    }
    error = Response(msgspec.json.encode(body), 424, mimetype="application/json")
    error.headers["X-Amzn-ErrorType"] = "ModelError"
    return error
