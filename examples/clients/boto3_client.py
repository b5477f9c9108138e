"""Call a SageMaker endpoint, or a local container, with boto3: one answer whole, one streamed.

`python -m examples.clients.boto3_client --endpoint NAME [--prompt TEXT]`. With
`--url http://localhost:8080` it calls a container with `option.local_runtime_api=true` instead; the
endpoint's name is then ignored.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import boto3

from deploy.sagemaker.runtime import whole_lines

PARAMETERS = {"max_new_tokens": 20}
LOCAL = {"region_name": "us-east-1", "aws_access_key_id": "none", "aws_secret_access_key": "none"}
"""A container does not check signatures, but boto3 needs credentials to sign requests."""


def ask(client: Any, endpoint: str, prompt: str) -> str:
    """Return the whole answer. Raises ClientError with the container's message."""
    body = json.dumps({"inputs": prompt, "parameters": PARAMETERS})
    answer = client.invoke_endpoint(
        EndpointName=endpoint, ContentType="application/json", Body=body
    )
    return json.load(answer["Body"])["generated_text"]


def stream(client: Any, endpoint: str, prompt: str) -> Iterator[str]:
    """Yield pieces of text as they arrive. Raises RuntimeError if the stream fails midway.

    SageMaker may split the container's output anywhere; `whole_lines` reassembles the lines.
    """
    body = json.dumps({"inputs": prompt, "parameters": PARAMETERS, "stream": True})
    answer = client.invoke_endpoint_with_response_stream(
        EndpointName=endpoint, ContentType="application/json", Body=body
    )
    for line in whole_lines(event["PayloadPart"]["Bytes"] for event in answer["Body"]):
        token = json.loads(line)["token"]
        if "error_msg" in token:
            raise RuntimeError(token["error_msg"])
        yield token["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint", default="any")
    parser.add_argument("--url", help="URL of a local container (default: call AWS)")
    parser.add_argument("--prompt", default="ROMEO:")
    arguments = parser.parse_args()
    local = {"endpoint_url": arguments.url, **LOCAL} if arguments.url else {}
    client = boto3.client("sagemaker-runtime", **local)
    print(ask(client, arguments.endpoint, arguments.prompt))
    for text in stream(client, arguments.endpoint, arguments.prompt):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
