"""Call a SageMaker endpoint, or a local container with `option.local_runtime_api`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from botocore.exceptions import EventStreamError

from deploy.sagemaker.errors import DeployError
from deploy.sagemaker.resources.aws import Aws


class Runtime:
    """Sends requests to an endpoint.

    Set AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME=http://localhost:8080 to call a local container.
    """

    def __init__(self, aws: Aws, endpoint: str, *, component: str | None = None) -> None:
        self._client = aws.client("sagemaker-runtime")
        self._call: dict[str, Any] = {"EndpointName": endpoint, "ContentType": "application/json"}
        if component is not None:
            self._call["InferenceComponentName"] = component

    def invoke(self, body: dict[str, Any]) -> str:
        """Return the complete response body."""
        response = self._client.invoke_endpoint(**self._call, Body=json.dumps(body))
        return response["Body"].read().decode()

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the response's lines as they arrive. Raises DeployError if the stream breaks."""
        response = self._client.invoke_endpoint_with_response_stream(
            **self._call, Body=json.dumps({**body, "stream": True})
        )
        try:
            yield from whole_lines(event["PayloadPart"]["Bytes"] for event in response["Body"])
        except EventStreamError as error:
            raise DeployError(f"the stream broke: {error}") from error
        finally:
            response["Body"].close()


def whole_lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of UTF-8 text that arrives in parts, such as SageMaker's PayloadParts.

    Parts may end anywhere, even within a character. The last line may lack its newline. A line ends
    with `\\n` only: JSON may contain other characters at which `str.splitlines` would split.
    """
    pending: list[bytes] = []
    for part in parts:
        first, *others = part.split(b"\n")
        pending.append(first)
        for other in others:
            yield b"".join(pending).decode()
            pending = [other]
    if last := b"".join(pending):
        yield last.decode()
