"""Transport to a SageMaker endpoint through boto3, with the credentials that boto3 finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from loadtest.servers.clients.transport import SendError, split_lines


class SageMakerTransport:
    """Calls InvokeEndpointWithResponseStream; `lines` ignores its path."""

    def __init__(self, endpoint: str, timeout_s: float, runtime_url: str | None = None) -> None:
        """runtime_url: address of a runtime other than AWS's, such as a container itself."""
        self._endpoint = endpoint
        self._client: Any = boto3.client(
            "sagemaker-runtime",
            endpoint_url=runtime_url,
            config=Config(
                connect_timeout=timeout_s,
                read_timeout=timeout_s,
                retries={"total_max_attempts": 1},  # a retry would hide the first attempt's time
            ),
        )

    def lines(self, path: str, body: bytes) -> Iterator[tuple[float, bytes]]:
        try:
            response = self._client.invoke_endpoint_with_response_stream(
                EndpointName=self._endpoint, ContentType="application/json", Body=body
            )
            yield from split_lines(_payloads(response["Body"]))
        except (BotoCoreError, ClientError, HTTPClientError, OSError) as error:
            raise SendError(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        self._client.close()


def _payloads(events: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    for event in events:
        if "PayloadPart" not in event:
            raise SendError(f"the stream broke off: {event}")
        yield event["PayloadPart"]["Bytes"]
