"""The routes of the SageMaker runtime API, which AWS puts in front of a container.

With option.local_runtime_api, `boto3.client("sagemaker-runtime",
endpoint_url="http://localhost:8080")` works without AWS. Request signatures are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from flask import Response, current_app, g

from container.apis.invocations.api import invoke
from container.apis.invocations.event_stream import MIMETYPE, payload_part
from container.http.route import ALL_KINDS, Api, post
from container.http.service import Service

_VARIANT = "AllTraffic"


def invoke_endpoint(service: Service, name: str) -> Response:
    """Handle InvokeEndpoint. Every endpoint's name leads to this container's model."""
    return _answer(service, "Accept")


def invoke_endpoint_with_response_stream(service: Service, name: str) -> Response:
    """Handle InvokeEndpointWithResponseStream, which frames the response as events."""
    g.context.send_chunk = None  # each part becomes an event
    response = _answer(service, "X-Amzn-SageMaker-Accept")
    if response.status_code != 200:
        return response
    framed = Response(_frames(response), content_type=MIMETYPE)
    framed.headers["X-Amzn-SageMaker-Content-Type"] = response.content_type
    framed.headers["X-Amzn-Invoked-Production-Variant"] = _VARIANT
    framed.call_on_close(response.close)
    return framed


def _answer(service: Service, accept_header: str) -> Response:
    """Return the container's response; an error becomes the runtime's ModelError."""
    try:
        response = invoke(service, accept_header)
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


RUNTIME = Api(
    "SageMaker",
    (
        post("/endpoints/<name>/invocations", "SageMaker's InvokeEndpoint.", invoke_endpoint,
             takes_invocation=True),
        post("/endpoints/<name>/invocations-response-stream",
             "SageMaker's InvokeEndpointWithResponseStream.", invoke_endpoint_with_response_stream,
             takes_invocation=True),
    ),
    kinds=ALL_KINDS,
    is_enabled=lambda server: server.local_runtime_api,
)  # fmt: skip
