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

from tests.container.clients import hugging_face, openai_client, sagemaker_runtime
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


@pytest.mark.parametrize("logprobs", [0, 1])
def test_prompt_scorers_generate_nothing(http: FlaskClient, logprobs: int) -> None:
    """`max_tokens=0` with `echo` and `logprobs`, whole and streamed."""
    fields = {"model": "demo", "prompt": ["Qu", "R"], "max_tokens": 0, "echo": True}
    with openai_client(http) as client:
        whole = client.completions.create(**fields, logprobs=logprobs)
        chunks = list(
            client.completions.create(
                **fields, logprobs=logprobs, stream=True, stream_options={"include_usage": True}
            )
        )
    assert [choice.text for choice in whole.choices] == ["Qu", "R"]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    scored = whole.choices[0].logprobs
    assert scored is not None
    assert (scored.tokens, scored.token_logprobs) == (["Q", "u"], [None, -0.5])
    assert scored.top_logprobs is not None
    assert (scored.top_logprobs[0], scored.top_logprobs[1]["u"]) == (None, -0.5)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 0)
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Qu", "R"]
    assert chunks[-1].usage == whole.usage


def test_without_echo_an_answer_has_a_token(http: FlaskClient) -> None:
    response = http.post("/v1/completions", json={"prompt": "Q", "max_tokens": 0})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "max_tokens")


def test_every_chunk_may_count_tokens(http: FlaskClient) -> None:
    """vLLM's `continuous_usage_stats`, from which benchmarks count tokens while they arrive."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with openai_client(http) as client:
        chat = client.chat.completions.create(
            model="demo", messages=[USER], stream=True, stream_options=options
        )
        chats = [chunk.usage.completion_tokens for chunk in chat]
        text = client.completions.create(
            model="demo", prompt="Q", stream=True, stream_options=options
        )
        texts = [chunk.usage.completion_tokens for chunk in text]
    for counts in (chats, texts):
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 9)
    unknown = ask(http, stream=True, stream_options={"include_usge": True})
    assert unknown.get_json()["error"]["param"] == "stream_options.include_usge"


def test_fields_that_vllms_clients_read_are_null(http: FlaskClient) -> None:
    chat = ask(http).get_json()
    assert chat["prompt_logprobs"] is None
    (choice,) = http.post("/v1/completions", json={"prompt": "Q"}).get_json()["choices"]
    assert choice["prompt_logprobs"] is None
