"""A SageMaker endpoint, or a container on a laptop, with boto3.

`python -m examples.clients.boto3_client --endpoint NAME [--prompt TEXT]`; with
`--url http://localhost:8080` a container with `option.local_runtime_api=true` is called instead,
whatever the name. An answer whole, and one as it comes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import boto3

from deploy.lines import whole_lines

PARAMETERS = {"max_new_tokens": 20}
LOCAL = {"region_name": "us-east-1", "aws_access_key_id": "none", "aws_secret_access_key": "none"}
"""A container checks no signature, but boto3 wants to make one."""


def ask(client: Any, endpoint: str, prompt: str) -> str:
    """The whole answer. What goes wrong is a ClientError with the container's own message."""
    body = json.dumps({"inputs": prompt, "parameters": PARAMETERS})
    answer = client.invoke_endpoint(
        EndpointName=endpoint, ContentType="application/json", Body=body
    )
    return json.load(answer["Body"])["generated_text"]


def stream(client: Any, endpoint: str, prompt: str) -> Iterator[str]:
    """Pieces of text as they come. Raises RuntimeError where the stream fails midway.

    SageMaker cuts what a container sends anywhere, so the lines are put together again.
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
    parser.add_argument("--url", help="of a container; else the endpoint of the AWS account")
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
