"""What other people's clients send, and what they read from the answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from botocore.exceptions import ClientError
from flask.testing import FlaskClient
from huggingface_hub.errors import HfHubHTTPError

from tests.container.clients import hugging_face, sagemaker_runtime
from tests.container.conftest import Serve
from tests.container.fake_engine import FakeEngine
from tests.container.test_chat import USER, ask, submitted
from tests.container.test_structured import SCHEMA, grammar

JSON = {"EndpointName": "any", "ContentType": "application/json"}


@pytest.mark.parametrize("kind", ["json", "json_object"])
def test_the_schema_of_hugging_faces_chat(http: FlaskClient, engine: FakeEngine, kind: str) -> None:
    with hugging_face(http) as client:
        client.chat_completion([USER], response_format={"type": kind, "value": SCHEMA})
        (constraint,) = json.loads(grammar(engine))["grammars"]
        assert constraint["json_schema"]["properties"] == SCHEMA["properties"]
        with pytest.raises(HfHubHTTPError, match="type text takes no other field"):
            client.chat_completion([USER], response_format={"type": "text", "value": SCHEMA})


def test_custom_attributes_choose_the_route(serve: Serve) -> None:
    """With boto3, as with AWS's vLLM image; also from a stream, and beside other attributes."""
    http = serve(local_runtime_api=True)
    prompt, chat = json.dumps({"prompt": "Q"}), json.dumps({"messages": [USER], "stream": True})
    with closing(sagemaker_runtime(http)) as client:
        answer = client.invoke_endpoint(**JSON, Body=prompt, CustomAttributes="route=/tokenize")
        assert json.load(answer["Body"])["count"] == 1
        assert answer["CustomAttributes"] == "route=/tokenize"
        same = client.invoke_endpoint(**JSON, Body=prompt, CustomAttributes="route=/invocations")
        assert json.load(same["Body"])["object"] == "text_completion"
        streamed = client.invoke_endpoint_with_response_stream(
            **JSON, Body=chat, CustomAttributes="trace=1,route=/v1/chat/completions"
        )
        assert streamed["ContentType"] == "text/event-stream"
        with pytest.raises(ClientError) as caught:
            client.invoke_endpoint(**JSON, Body=prompt, CustomAttributes="route=/v1/nope")
    assert caught.value.response["OriginalStatusCode"] == 404
    error = json.loads(caught.value.response["OriginalMessage"])["error"]
    assert error["message"].startswith("no such path: /v1/nope")
    get_only = http.post(
        "/invocations", headers={"X-Amzn-SageMaker-Custom-Attributes": "route=/metrics"}
    )
    assert get_only.status_code == 405


class LineIterator:
    """AWS's own, of its examples and of LangChain's `SagemakerEndpoint`: it stops at a newline.

    At the end of the stream it does not stop if characters remain.
    """

    def __init__(self, stream: Iterator[dict[str, dict[str, bytes]]]) -> None:
        self._events, self._buffer, self._position = iter(stream), io.BytesIO(), 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self._buffer.seek(self._position)
            line = self._buffer.readline()
            if line and line[-1] == ord("\n"):
                self._position += len(line)
                yield line[:-1]
                continue
            event = next(self._events, None)
            if event is None:
                assert self._position == self._buffer.getbuffer().nbytes, "it never ends"
                return
            self._buffer.seek(0, io.SEEK_END)
            self._buffer.write(event["PayloadPart"]["Bytes"])


@pytest.mark.parametrize("stream", [False, True])
def test_awss_line_iterator_ends(serve: Serve, stream: bool) -> None:
    body = json.dumps({"inputs": "Q", "stream": stream})
    with closing(sagemaker_runtime(serve(local_runtime_api=True))) as client:
        answer = client.invoke_endpoint_with_response_stream(**JSON, Body=body)
        lines = [json.loads(line) for line in LineIterator(answer["Body"])]
    assert lines[-1]["generated_text"] == "Hi there"


@pytest.mark.parametrize(
    ("content", "fields"),
    [("x" * 100, {}), ("x" * 100, {"max_tokens": 1}), ("x", {"max_tokens": 95})],
)
def test_litellm_sees_that_a_prompt_is_too_long(
    http: FlaskClient, content: str, fields: dict[str, int]
) -> None:
    """Its fallbacks to models with more context start at these words."""
    response = ask(http, {"role": "user", "content": content}, **fields)
    assert response.status_code == 400
    message = response.get_json()["error"]["message"]
    assert "this model's maximum context length is 100 tokens" in message.lower()


def test_fields_that_clients_leak(http: FlaskClient, engine: FakeEngine) -> None:
    """Null is not set, whatever its name; litellm's `sagemaker_chat` sends `aws_region_name`."""
    response = ask(http, aws_region_name="us-east-1", extra_headers=None, thinking=None)
    assert response.status_code == 200
    assert "aws_region_name" in response.headers["X-Longshore-Warning"]
    assert ask(http, extra_headers={}).status_code == 400
    nulls = {"inputs": "Q", "parameters": {"watermark": None, "new": None}, "details": None}
    assert http.post("/invocations", json=nulls).status_code == 200


def test_tenants_are_kept_apart(http: FlaskClient, engine: FakeEngine) -> None:
    """`cache_salt`, as vLLM's clients send it in `extra_body`."""
    assert ask(http, cache_salt="tenant").status_code == 200
    assert submitted(engine).params.cache_salt == "tenant"
    http.post("/invocations", json={"inputs": "Q", "parameters": {"cache_salt": "other"}})
    assert submitted(engine).params.cache_salt == "other"
