"""Calling an endpoint, or the container itself on a laptop: `option.local_runtime_api`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from botocore.exceptions import EventStreamError

from deploy.aws import Aws
from deploy.errors import DeployError
from deploy.lines import whole_lines


class Runtime:
    """AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME=http://localhost:8080 names a container instead."""

    def __init__(self, aws: Aws, endpoint: str, *, component: str | None = None) -> None:
        self._client = aws.client("sagemaker-runtime")
        self._call: dict[str, Any] = {"EndpointName": endpoint, "ContentType": "application/json"}
        if component is not None:
            self._call["InferenceComponentName"] = component

    def invoke(self, body: dict[str, Any]) -> str:
        """The whole answer."""
        answer = self._client.invoke_endpoint(**self._call, Body=json.dumps(body))
        return answer["Body"].read().decode()

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """The answer's lines as they come. Raises DeployError where the stream breaks."""
        answer = self._client.invoke_endpoint_with_response_stream(
            **self._call, Body=json.dumps({**body, "stream": True})
        )
        try:
            yield from whole_lines(event["PayloadPart"]["Bytes"] for event in answer["Body"])
        except EventStreamError as error:
            raise DeployError(f"the stream broke: {error}") from error
        finally:
            answer["Body"].close()
