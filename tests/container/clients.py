"""Clients of OpenAI, Hugging Face and AWS that call an application directly, without a socket."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import httpx
import httpx2
import huggingface_hub
import openai
from botocore.awsrequest import AWSRequest, AWSResponse
from flask.testing import FlaskClient
from huggingface_hub import InferenceClient

BASE_URL = "http://testserver"


def openai_client(http: FlaskClient, path: str = "/v1") -> openai.OpenAI:
    """Return OpenAI's client for the routes below `path`."""
    transport = httpx.WSGITransport(app=http.application, raise_app_exceptions=True)
    return openai.OpenAI(
        base_url=f"{BASE_URL}{path}",
        api_key="none",
        max_retries=0,
        http_client=httpx.Client(transport=transport),
    )


@contextmanager
def hugging_face(http: FlaskClient, path: str = "") -> Iterator[InferenceClient]:
    """Yield huggingface_hub's client. Its model is given as the application's URL and `path`."""
    transport = httpx2.WSGITransport(app=http.application)
    huggingface_hub.set_client_factory(lambda: httpx2.Client(transport=transport))
    try:
        yield InferenceClient(f"{BASE_URL}{path}")
    finally:
        huggingface_hub.close_session()
        huggingface_hub.set_client_factory(httpx2.Client)


def sagemaker_runtime(http: FlaskClient) -> Any:
    """Return boto3's client of the SageMaker runtime API.

    The application serves that API only with option.local_runtime_api.
    """
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=BASE_URL,
        region_name="us-east-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
    )

    def answer(request: AWSRequest, **_: object) -> AWSResponse:
        path = request.url.removeprefix(BASE_URL)
        headers = {name: _text(value) for name, value in request.headers.items()}
        response = http.open(path, method=request.method, data=request.body, headers=headers)
        return AWSResponse(request.url, response.status_code, response.headers, _Raw(response.data))

    client.meta.events.register("before-send.sagemaker-runtime", answer)
    return client


class _Raw(io.BytesIO):
    """A response body with the methods of urllib3 that botocore calls."""

    def stream(self, amt: int = 2**16, decode_content: bool = False) -> Iterator[bytes]:
        while part := self.read(amt):
            yield part


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
