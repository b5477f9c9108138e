"""OpenAI's completions, models and tokenize routes with a fake engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from core.protocol.messages import Abort, Submit
from core.text.tokenizer import Tokenizer
from tests.container.apis.test_chat import events, submitted
from tests.container.conftest import EOS, eventually
from tests.container.fake_engine import FakeEngine, fails, says, stalls


def ask(
    http: FlaskClient, prompt: object, path: str = "/v1/completions", **fields: Any
) -> TestResponse:
    return http.post(path, json={"prompt": prompt, **fields})


@pytest.fixture
def parrot(engine: FakeEngine) -> None:
    """Make the engine answer with two copies of the prompt."""

    def script(submit: Submit):
        return says([*submit.prompt_token_ids * 2, EOS])(submit)

    engine.script = script


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
def test_completion(http: FlaskClient, engine: FakeEngine, path: str) -> None:
    body = ask(http, "Q", path=path).get_json()
    assert (body["object"], body["model"], body["id"][:5]) == ("text_completion", "demo", "cmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hi there",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
    assert (submitted(engine).params.max_tokens, submitted(engine).params.temperature) == (16, 1.0)


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize("streamed", [False, True])
def test_several_prompts(http: FlaskClient, tokenizer: Tokenizer, streamed: bool) -> None:
    prompts = ["ab", "\u00e9", "x" * 5]
    for form in (prompts, [tokenizer.encode(prompt) for prompt in prompts]):
        texts, reasons, usage = ["", "", ""], {}, None
        usage_too = {"stream_options": {"include_usage": True}} if streamed else {}
        response = ask(http, form, stream=streamed, max_tokens=9, **usage_too)
        for record in events(response) if streamed else [response.get_json()]:
            for choice in record["choices"]:
                texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
            usage = record["usage"]
        assert texts == ["abab", "\u00e9\u00e9", "x" * 9]
        assert reasons == {0: "stop", 1: "stop", 2: "length"}
        assert usage == {"prompt_tokens": 9, "completion_tokens": 19, "total_tokens": 28}


def test_choices_are_streamed_as_they_are_generated(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """The second prompt's text arrives before the first prompt is answered."""
    (b,) = tokenizer.encode("b")
    engine.script = lambda submit: stalls(after=[b] if submit.prompt_token_ids == [b] else [])(
        submit
    )
    response = ask(http, ["a", "b"], stream=True)
    first = next(iter(response.response))
    assert isinstance(first, bytes)
    choice = json.loads(first.removeprefix(b"data: "))["choices"][0]
    assert (choice["index"], choice["text"]) == (1, "b")
    response.close()
    eventually(lambda: len(engine.of_type(Abort)) == 2)


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize("streamed", [False, True])
def test_echo(http: FlaskClient, tokenizer: Tokenizer, streamed: bool) -> None:
    for prompt in ("ab", tokenizer.encode("ab")):
        response = ask(http, prompt, echo=True, stream=streamed)
        records = events(response) if streamed else [response.get_json()]
        assert "".join(record["choices"][0]["text"] for record in records) == "ababab"


def test_logprobs(http: FlaskClient) -> None:
    expected = {
        "tokens": ["H", "i"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"H": -0.5}, {"i": -0.5}],
        "text_offset": [0, 1],
    }
    whole = ask(http, "Q", logprobs=0, max_tokens=2).get_json()
    assert whole["choices"][0]["logprobs"] == expected
    streamed = events(ask(http, "Q", logprobs=0, max_tokens=2, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    names = ("tokens", "token_logprobs", "text_offset")
    merged = {name: [value for part in parts if part for value in part[name]] for name in names}
    assert merged == {name: expected[name] for name in names}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[1], [2.5]]}, "prompt"),
    ({"prompt": [257]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a", "x" * 100]}, "prompt"),
    ({"prompt": "a", "max_tokens": 100}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": -1, "echo": True}, "logprobs"),
    ({"prompt": "a", "logprobs": 0, "echo": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt": "a", "message": []}, "message"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_invalid_requests(
    http: FlaskClient, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    response = http.post("/v1/completions", json=body)
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, param)
    eventually(lambda: len(engine.of_type(Submit)) == len(engine.of_type(Abort)))
    assert len(engine.of_type(Submit)) <= 1


def test_one_failed_choice_fails_the_request(http: FlaskClient, engine: FakeEngine) -> None:
    working = stalls(after=[65])

    def script(submit: Submit):
        is_second = len(engine.of_type(Submit)) % 2 == 0
        return fails("failed", "no luck")(submit) if is_second else working(submit)

    engine.script = script
    response = ask(http, ["a", "b"])
    assert (response.status_code, response.get_json()["error"]["message"]) == (424, "no luck")
    eventually(lambda: len(engine.of_type(Abort)) == 1)


def test_models(http: FlaskClient) -> None:
    (model,) = http.get("/v1/models").get_json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("demo", "model", 100)
    assert http.get("/v1/models/demo").get_json() == model
    other = http.get("/v1/models/a/b")
    assert (other.status_code, "has 'demo'" in other.get_json()["error"]["message"]) == (404, True)


def test_tokenize_and_detokenize(http: FlaskClient, tokenizer: Tokenizer) -> None:
    def tokenize(**body: object) -> dict[str, Any]:
        return http.post("/tokenize", json=body).get_json()

    tokens = tokenizer.encode("h\u00e9<eos>")
    assert tokenize(prompt="h\u00e9<eos>") == {
        "count": 4, "max_model_len": 100, "tokens": tokens, "token_strs": None,
    }  # fmt: skip
    assert tokenize(prompt="h<eos>", return_token_strs=True)["token_strs"] == ["h", "<eos>"]
    chat = tokenize(messages=[{"role": "user", "content": "Q"}])
    assert tokenizer.decode(chat["tokens"]) == "u:Q;a:"
    back = http.post("/detokenize", json={"tokens": tokens})
    assert back.get_json() == {"prompt": "h\u00e9<eos>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "Q"}]}, "messages"),
        ("/tokenize", {"messages": [{}]}, "messages[0].role"),
        ("/tokenize", {"text": "a"}, "text"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
    ],
)
def test_invalid_tokenize_requests(http: FlaskClient, path: str, body: object, param: str) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, param)


def test_answers_without_text(http: FlaskClient, engine: FakeEngine) -> None:
    """vLLM's `detokenize: false` is for clients that turn the token ids into text themselves."""
    fields = {"detokenize": False, "return_token_ids": True, "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "Q"}], **fields}
    (choice,) = http.post("/v1/chat/completions", json=chat).get_json()["choices"]
    assert (choice["message"]["content"], choice["token_ids"]) == ("", [39, 72])
    (choice,) = ask(http, "Q", **fields).get_json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("", [39, 72])
    details = {"detokenize": False, "details": True, "max_new_tokens": 2}
    body = http.post("/invocations", json={"inputs": "Q", "parameters": details}).get_json()
    assert body["generated_text"] == ""
    assert [token["id"] for token in body["details"]["tokens"]] == [39, 72]
    refused = ask(http, "Q", detokenize=False, stop="x").get_json()["error"]
    assert (refused["param"], "detokenize" in refused["message"]) == ("stop", True)
