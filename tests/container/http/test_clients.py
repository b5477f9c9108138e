"""Requests as other projects' clients send them, and the fields that these clients read."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import openai
import pytest
from botocore.exceptions import ClientError
from flask.testing import FlaskClient
from huggingface_hub.errors import HfHubHTTPError

from container.wire.engine_client import EngineClient
from core.protocol.stats import Stats
from core.text.tokenizer import Tokenizer
from tests.container.apis.test_chat import USER, ask, events, submitted
from tests.container.apis.test_structured import SCHEMA, grammar
from tests.container.clients import hugging_face, openai_client, sagemaker_runtime
from tests.container.conftest import EOS, Serve, eventually
from tests.container.fake_engine import FakeEngine, says

JSON = {"EndpointName": "any", "ContentType": "application/json"}


@pytest.mark.parametrize("kind", ["json", "json_object"])
def test_hugging_face_sends_the_schema_as_value(
    http: FlaskClient, engine: FakeEngine, kind: str
) -> None:
    with hugging_face(http) as client:
        client.chat_completion([USER], response_format={"type": kind, "value": SCHEMA})
        (constraint,) = json.loads(grammar(engine))["grammars"]
        assert constraint["json_schema"]["properties"] == SCHEMA["properties"]
        with pytest.raises(HfHubHTTPError, match="type text takes no other field"):
            client.chat_completion([USER], response_format={"type": "text", "value": SCHEMA})


def test_custom_attributes_choose_the_route(serve: Serve) -> None:
    """boto3 sends the attribute `route`, alone or beside other attributes, streaming or not."""
    http = serve(local_runtime_api=True)
    prompt, chat = json.dumps({"prompt": "Q"}), json.dumps({"messages": [USER], "stream": True})
    with closing(sagemaker_runtime(http)) as client:
        answer = client.invoke_endpoint(**JSON, Body=prompt, CustomAttributes="route=/tokenize")
        assert json.load(answer["Body"])["count"] == 1
        assert answer["CustomAttributes"] == "route=/tokenize"
        for other in ("route=/invocations", "my-route=/tokenize"):
            same = client.invoke_endpoint(**JSON, Body=prompt, CustomAttributes=other)
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


@pytest.mark.parametrize("path", ["//v1//completions", "/v1//completions", "/v1/completions/"])
def test_a_route_with_other_slashes_than_the_path_s_is_no_path(serve: Serve, path: str) -> None:
    """The server would answer such a URL with a redirect, which a header cannot follow."""
    answer = serve().post(
        "/invocations",
        json={"prompt": "Q"},
        headers={"X-Amzn-SageMaker-Custom-Attributes": f"route={path}"},
    )
    assert (answer.status_code, answer.mimetype) == (404, "application/json")
    assert f"no such path: {path}" in answer.text


class LineIterator:
    """AWS's own iterator, from its examples and LangChain's `SagemakerEndpoint`.

    It yields a line at each newline. Where characters remain at the end of the stream, AWS's code
    loops forever, and this copy fails an assertion.
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
                assert self._position == self._buffer.getbuffer().nbytes, "AWS's code loops"
                return
            self._buffer.seek(0, io.SEEK_END)
            self._buffer.write(event["PayloadPart"]["Bytes"])


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_iterator_of_aws_ends(serve: Serve, stream: bool) -> None:
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
    """litellm falls back to a model with more context if the error has these words."""
    response = ask(http, {"role": "user", "content": content}, **fields)
    assert response.status_code == 400
    message = response.get_json()["error"]["message"]
    assert "this model's maximum context length is 100 tokens" in message.lower()


def test_fields_that_clients_leak(http: FlaskClient, engine: FakeEngine) -> None:
    """A field that is null counts as not set.

    litellm's `sagemaker_chat` sends its own setting `aws_region_name` to the server.
    """
    response = ask(http, aws_region_name="us-east-1", extra_headers=None, thinking=None)
    assert response.status_code == 200
    assert "aws_region_name" in response.headers["X-Longshore-Warning"]
    assert ask(http, extra_headers={}).status_code == 400
    nulls = {"inputs": "Q", "parameters": {"watermark": None, "new": None}, "details": None}
    assert http.post("/invocations", json=nulls).status_code == 200


def test_tenants_are_kept_apart(http: FlaskClient, engine: FakeEngine) -> None:
    """The engine gets the `cache_salt` that vLLM's clients send in `extra_body`."""
    assert ask(http, cache_salt="tenant").status_code == 200
    assert submitted(engine).params.cache_salt == "tenant"
    http.post("/invocations", json={"inputs": "Q", "parameters": {"cache_salt": "other"}})
    assert submitted(engine).params.cache_salt == "other"


@pytest.mark.parametrize("logprobs", [0, 1])
def test_prompt_scorers_generate_nothing(http: FlaskClient, logprobs: int) -> None:
    """Prompt scorers send `max_tokens=0` with `echo` and `logprobs`, streamed or not."""
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


def test_max_tokens_0_needs_echo(http: FlaskClient) -> None:
    response = http.post("/v1/completions", json={"prompt": "Q", "max_tokens": 0})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "max_tokens")


def test_every_chunk_may_count_tokens(http: FlaskClient) -> None:
    """With vLLM's `continuous_usage_stats`, benchmarks count the tokens while they arrive."""
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


def test_what_clients_of_lmi_send(http: FlaskClient, engine: FakeEngine) -> None:
    """`stop` is one string, `seed: -1` means no seed, and `max_new_tokens` is beside `inputs`."""
    parameters = {"stop": "there", "seed": -1, "do_sample": True}
    response = http.post(
        "/invocations", json={"inputs": "Q", "parameters": parameters, "max_new_tokens": 5}
    )
    assert response.get_json() == {"generated_text": "Hi th"}
    params = submitted(engine).params
    assert (params.stop, params.seed, params.max_tokens) == (("there",), None, 5)
    twice = {"inputs": "Q", "max_new_tokens": 5, "parameters": {"max_new_tokens": 6}}
    refused = http.post("/invocations", json=twice)
    assert (refused.status_code, refused.get_json()["field"]) == (400, "max_new_tokens")


def test_token_ids_as_vllm_returns_them(http: FlaskClient, tokenizer: Tokenizer) -> None:
    """Reinforcement learning needs the token ids, since it must not tokenize the texts again."""
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "request_id": "mine"}
    answer = [*tokenizer.encode("Hi there"), EOS]
    chat = ask(http, logprobs=True, **extra).get_json()
    assert chat["id"] == "chatcmpl-mine"
    assert chat["prompt_token_ids"] == tokenizer.encode("u:Q;a:")
    (choice,) = chat["choices"]
    assert choice["token_ids"] == answer
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{answer[0]}"
    chunks = events(ask(http, stream=True, **extra))
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == answer

    body = {"prompt": "Q", "logprobs": 1, **extra}
    (choice,) = http.post("/v1/completions", json=body).get_json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (tokenizer.encode("Q"), answer)
    assert choice["logprobs"]["tokens"][0] == f"token_id:{answer[0]}"
    chunks = events(http.post("/v1/completions", json={**body, "stream": True}))
    assert chunks[0]["choices"][0]["prompt_token_ids"] == tokenizer.encode("Q")
    ids = [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])]
    assert ids == answer
    assert "token_ids" not in ask(http).get_json()["choices"][0]
    assert ask(http, request_id="a b").get_json()["error"]["param"] == "request_id"


@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"), [(2, 3, "yz"), (-1, 98, "yz"), (50, 3, "xyz")]
)
def test_prompts_are_truncated_from_the_left(
    http: FlaskClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    keep: int,
    max_tokens: int,
    expected: str,
) -> None:
    fields = {"prompt": "xyz", "truncate_prompt_tokens": keep, "max_tokens": max_tokens}
    answer = http.post("/v1/completions", json=fields).get_json()
    assert tokenizer.decode(submitted(engine).prompt_token_ids) == expected
    assert answer["usage"]["prompt_tokens"] == len(expected)
    echoed = http.post("/v1/completions", json={**fields, "echo": True}).get_json()
    assert echoed["error"]["param"] == "truncate_prompt_tokens"


def test_an_echo_of_the_last_message(http: FlaskClient) -> None:
    """With vLLM's `echo` and `continue_final_message`, the answer begins with the last message."""
    started = {"role": "assistant", "content": "Well. "}
    fields = {"continue_final_message": True, "echo": True}
    for message in (started, {**started, "content": [{"type": "text", "text": "Well. "}]}):
        (choice,) = ask(http, USER, message, **fields).get_json()["choices"]
        assert choice["message"]["content"] == "Well. Hi there"
    chunks = events(ask(http, USER, started, stream=True, **fields))
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == "Well. Hi there"
    assert ask(http, echo=True).get_json()["choices"][0]["message"]["content"] == "Hi there"


def test_fields_of_vllm_without_effect(http: FlaskClient, engine: FakeEngine) -> None:
    extra = {"vllm_xargs": {"a": 1}, "kv_transfer_params": {}}
    warnings = ask(http, **extra).headers["X-Longshore-Warning"]
    assert all(name in warnings for name in extra)
    refused = ask(http, logits_processors=["x"]).get_json()["error"]
    assert refused["param"] == "logits_processors"
    assert "logit_bias" in refused["message"]
    assert ask(http, guided_whitespace_pattern=" ?").status_code == 400
    http.post("/v1/completions", json={"prompt": "Q", "max_completion_tokens": 2})
    assert submitted(engine).params.max_tokens == 2


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer, mode: Literal["auto", "required"]
) -> None:
    """With `allowed_tools` as OpenAI's `tool_choice`, the model sees only some of the tools."""
    http = serve(tool_call_parser="hermes")
    functions: list[Any] = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions[1:]}}
    with openai_client(http) as client:
        client.chat.completions.create(
            model="demo", messages=[USER], tools=functions, tool_choice=choice
        )
        assert tokenizer.decode(submitted(engine).prompt_token_ids) == "g;h;u:Q;a:"
        assert (submitted(engine).params.structured_outputs is not None) == (mode == "required")
        with pytest.raises(openai.BadRequestError, match="no function 'f'"):
            client.chat.completions.create(
                model="demo",
                messages=[USER],
                tools=functions[1:],
                tool_choice={
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": mode, "tools": functions},
                },
            )
    nameless = {"mode": mode, "tools": [{"type": "function", "function": {}}]}
    for wrong in ({}, {"mode": "none", "tools": []}, {"mode": "auto"}, nameless):
        tools = [*functions, {"type": "function", "function": {}}]
        response = ask(http, tools=tools, tool_choice={**choice, "allowed_tools": wrong})
        assert response.get_json()["error"]["param"].startswith("tool_choice.allowed_tools")


@pytest.mark.parametrize("path", ["/v1", "/openai/v1"])
def test_both_prefixes_of_openais_routes(http: FlaskClient, path: str) -> None:
    with openai_client(http, path) as client:
        answer = client.chat.completions.create(model="demo", messages=[USER])
        assert answer.choices[0].message.content == "Hi there"
        assert [model.id for model in client.models.list()] == ["demo"]
        with pytest.raises(openai.BadRequestError, match="at least one message"):
            client.chat.completions.create(model="demo", messages=[])


def test_version_and_load(http: FlaskClient, engine: FakeEngine, client: EngineClient) -> None:
    assert re.match(r"\d+\.\d+", http.get("/version").get_json()["version"])
    engine.stats = Stats(num_running=2, num_waiting=3)
    eventually(lambda: client.copies[0].state.stats.num_waiting)
    assert http.get("/load").get_json() == {"server_load": 5}


def test_text_generation_inferences_client(http: FlaskClient) -> None:
    with hugging_face(http, "/") as client:
        assert client.text_generation("Q", details=False) == "Hi there"
        answer = client.text_generation("Q", details=True)
        assert (answer.generated_text, answer.details.finish_reason) == ("Hi there", "eos_token")
        pieces = list(client.text_generation("Q", stream=True, details=True))
    assert "".join(piece.token.text for piece in pieces) == "Hi there"
    assert pieces[-1].details is not None


def test_routes_of_text_generation_inference(http: FlaskClient) -> None:
    body = {"inputs": "Q", "parameters": {"max_new_tokens": 2}, "stream": True}
    assert http.post("/generate", json=body).get_json() == {"generated_text": "Hi"}
    streamed = http.post("/generate_stream", json={**body, "stream": None})
    assert streamed.mimetype == "text/event-stream"
    first, last = (
        json.loads(event.removeprefix("data: ")) for event in streamed.text.split("\n\n")[:-1]
    )
    assert first["token"] == {"id": 39, "text": "H", "logprob": -0.5, "special": False}
    assert (last["index"], last["generated_text"], last["details"]) == (2, "Hi", None)
    wrong = http.post("/generate", json={"inputs": "Q", "parameters": {"top_p": 2}})
    assert (wrong.status_code, wrong.get_json()["error_type"]) == (400, "validation")
    info = http.get("/info").get_json()
    assert (info["max_total_tokens"], info["max_input_tokens"]) == (100, 99)
    assert (info["model_id"], info["model_dtype"]) == ("fake", "float32")


def test_browsers_may_call_from_an_allowed_origin(serve: Serve) -> None:
    """For pages such as Open WebUI, a browser sends OPTIONS first, and then the call itself."""
    http = serve(cors_allowed_origin="https://example.com")
    asks = {"Origin": "https://example.com", "Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization,content-type"}
    preflight = http.options("/v1/chat/completions", headers=asks)
    assert preflight.status_code == 200
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    for response in (preflight, ask(http), ask(http, temperature=-1)):
        assert response.headers["Access-Control-Allow-Origin"] == "https://example.com"
    assert "Access-Control-Allow-Origin" not in ask(serve()).headers


def test_openais_deprecated_functions(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """Older agents still send `functions` and `function_call` instead of `tools`."""
    http = serve(tool_call_parser="mistral")
    calls = '[TOOL_CALLS][{"name":"f","arguments":{}},{"name":"f","arguments":{}}]'
    engine.script = says([*tokenizer.encode(calls), EOS])
    expected = {"name": "f", "arguments": "{}"}
    named = {"function_call": {"name": "f"}}
    for fields in ({}, {"function_call": "auto"}, named):
        (choice,) = ask(http, functions=[{"name": "f"}], **fields).get_json()["choices"]
        assert choice["finish_reason"] == ("stop" if fields is named else "function_call")
        assert choice["message"]["function_call"] == expected
        assert "tool_calls" not in choice["message"]
    assert tokenizer.decode(submitted(engine).prompt_token_ids) == "f;u:Q;a:"
    chunks = events(ask(http, functions=[{"name": "f"}], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["function_call"] for delta in deltas if "function_call" in delta] == [expected]
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"

    asked = {"role": "assistant", "content": None, "function_call": expected}
    result = {"role": "function", "name": "f", "content": "2"}
    assert ask(http, USER, asked, result, functions=[{"name": "f"}]).status_code == 200
    prompt = tokenizer.decode(submitted(engine).prompt_token_ids)
    assert prompt.endswith("t:2;a:"), "the result has the role tool"
    for fields, param in (
        ({"functions": [{"name": "f"}], "tools": []}, "tools"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"function_call": "sometimes"}, "function_call"),
    ):
        assert ask(http, **fields).get_json()["error"]["param"] == param
    assert ask(http, function_call="none").status_code == 200
