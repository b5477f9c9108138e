"""Official clients against a running container."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Literal

import boto3
import openai
import pydantic
import pytest
from botocore.exceptions import ClientError
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from core.text.template_files import load_chat_template
from engine import LLM, SamplingParams
from tests.e2e.serving import DEMO, MODEL_NAME, Container, serve

MESSAGES = [{"role": "user", "content": "Speak, Romeo."}]
NUM_NEW = 12


@pytest.fixture(scope="module")
def container(tmp_path_factory) -> Iterator[Container]:
    with serve(tmp_path_factory.mktemp("clients"), "option.dtype=fp32\n") as container:
        yield container


@pytest.fixture(scope="module")
def expected():
    """Return a function that returns the offline engine's answer to a prompt."""
    llm = LLM(DEMO, batching="none", dtype="fp32")
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)

    def say(prompt: str) -> str:
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
        return answer.outputs[0].text

    return say


@pytest.fixture
def client(container) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{container.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(client, expected):
    text = expected(load_chat_template(DEMO, None).render(MESSAGES))
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": NUM_NEW, "temperature": 0}
    answer = client.chat.completions.create(**options)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == NUM_NEW

    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert sum(len(logprob.content) for logprob in logprobs if logprob) == NUM_NEW
    assert last.usage == answer.usage

    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as caught:
        client.chat.completions.create(**options, extra_body={"temprature": 1})
    assert caught.value.param == "temprature"


def test_openai_completions(client, expected):
    prompts = ["ROMEO:", "KING"]
    options = {"model": "demo", "prompt": prompts, "max_tokens": NUM_NEW, "temperature": 0}
    texts = [expected(prompt) for prompt in prompts]
    whole = client.completions.create(**options)
    assert [choice.text for choice in whole.choices] == texts
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    streamed = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    (echoed,) = client.completions.create(**{**options, "prompt": "ROMEO:"}, echo=True).choices
    assert echoed.text == "ROMEO:" + texts[0]


def test_openai_choices(client):
    """Several choices, streamed and whole, with top logprobs."""
    options = {
        "model": "demo", "messages": MESSAGES, "max_tokens": NUM_NEW, "seed": 5, "n": 3,
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    answer = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    num_tokens = sum(len(choice.logprobs.content) for choice in answer.choices)
    assert answer.usage.completion_tokens == num_tokens
    for choice in answer.choices:
        for place in choice.logprobs.content:
            assert len(place.top_logprobs) == 2
            assert place.logprob <= place.top_logprobs[0].logprob
    streamed = ["", "", ""]
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert last.usage == answer.usage


def test_openai_prompt_logprobs(client):
    """With `echo`, the answer has the log-probabilities of the prompt, for evaluation harnesses."""
    options = {"model": "demo", "prompt": "To be, or not", "max_tokens": 1, "temperature": 0}
    (choice,) = client.completions.create(**options, echo=True, logprobs=1).choices
    places = choice.logprobs
    assert places.token_logprobs[0] is None
    assert all(token_logprob < 0 for token_logprob in places.token_logprobs[1:])
    assert choice.text.startswith("To be, or not")
    assert "".join(places.tokens) == choice.text
    for token, offset in zip(places.tokens, places.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert places.top_logprobs[-1][places.tokens[-1]] == max(places.top_logprobs[-1].values())
    (other,) = client.completions.create(
        **{**options, "prompt": "To be, xr not"}, echo=True, logprobs=0
    ).choices
    assert sum(other.logprobs.token_logprobs[1:]) < sum(places.token_logprobs[1:])


class Speech(pydantic.BaseModel):
    """An answer format; short, because the demo model is verbose."""

    mood: Literal["merry", "sad"]
    acts: list[Annotated[int, pydantic.Field(ge=1, le=5)]] = pydantic.Field(max_length=3)


def test_openai_structured_outputs(client):
    """The client derives the schema from a class and parses the answer into it."""
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 300, "seed": 3}
    answer = client.chat.completions.parse(**options, response_format=Speech)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.parsed == Speech.model_validate_json(choice.message.content)
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client.chat.completions.create(**options, extra_body={"guided_json": schema})
    assert caught.value.param == "guided_json"


def test_openai_forced_tools(client):
    """Even a model that was not trained for tools has to call one."""
    tools = [openai.pydantic_function_tool(Speech, name=name) for name in ("speak", "whisper")]
    options = {"model": "demo", "messages": MESSAGES, "max_tokens": 300, "seed": 4, "tools": tools}
    named = {"type": "function", "function": {"name": "whisper"}}
    options["parallel_tool_calls"] = False
    for choice in ("required", named):
        answer = client.chat.completions.create(**options, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == ("stop" if choice == named else "tool_calls")
        assert call.function.name in ("speak", "whisper")
        assert Speech.model_validate_json(call.function.arguments)
    stream = client.chat.completions.create(**options, tool_choice=named, stream=True)
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [streamed_call.function.arguments for streamed_call in calls] == [
        call.function.arguments
    ]
    assert call.function.name == "whisper"


def test_openai_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL_NAME
    assert client.models.retrieve(MODEL_NAME) == model
    with pytest.raises(openai.NotFoundError, match=f"this server has '{MODEL_NAME}'"):
        client.models.retrieve("other")


@pytest.mark.matrix(cases=0)
def test_hugging_face(tmp_path, expected):
    text = expected("ROMEO:")
    with serve(tmp_path, "option.dtype=fp32\noption.tgi_compat=true\n") as container:
        url = f"http://127.0.0.1:{container.port}"
        with closing(InferenceClient(f"{url}/invocations")) as client:
            options = {"max_new_tokens": NUM_NEW}
            assert client.text_generation("ROMEO:", **options) == text
            answer = client.text_generation(
                "ROMEO:", **options, details=True, decoder_input_details=True
            )
            assert (answer.generated_text, answer.details.finish_reason) == (text, "length")
            assert "".join(token.text for token in answer.details.tokens) == text
            assert "".join(token.text for token in answer.details.prefill) == "ROMEO:"
            logprobs = [token.logprob for token in answer.details.prefill]
            assert logprobs[0] is None
            assert all(logprob < 0 for logprob in logprobs[1:])
            pieces = list(client.text_generation("ROMEO:", **options, stream=True, details=True))
            assert "".join(piece.token.text for piece in pieces) == text
            assert pieces[-1].generated_text == text
            assert pieces[-1].details.generated_tokens == NUM_NEW
            answer = client.text_generation(
                "ROMEO:", **options, details=True, best_of=2, seed=3, do_sample=True, top_n_tokens=2
            )
            (other,) = answer.details.best_of_sequences
            assert other.generated_text != answer.generated_text
            sums = [sum(t.logprob for t in details.tokens) for details in (answer.details, other)]
            assert sums[0] >= sums[1]
            for token, top in zip(answer.details.tokens, answer.details.top_tokens, strict=True):
                assert len(top) == 2
                assert token.logprob <= top[0]["logprob"]  # the client returns top tokens as dicts
            with pytest.raises(HfHubHTTPError, match="watermark: not supported"):
                client.text_generation("ROMEO:", **options, watermark=True)

        with closing(InferenceClient(url)) as client:
            chat = client.chat_completion(MESSAGES, max_tokens=NUM_NEW, temperature=0)
        expected_text = expected(load_chat_template(DEMO, None).render(MESSAGES))
        assert chat.choices[0].message.content == expected_text


def test_boto3(tmp_path, expected):
    """boto3's client of SageMaker's runtime works with the container's local runtime routes."""
    text = expected("ROMEO:")
    options = "option.dtype=fp32\noption.local_runtime_api=true\n"
    options += f"option.enable_stateful_sessions=true\noption.sessions_path={tmp_path}/sessions\n"
    with serve(tmp_path, options) as container:
        client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=f"http://127.0.0.1:{container.port}",
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
        )
        with closing(client):
            _check_runtime(client, text)


def _check_runtime(client, text):
    request = {"inputs": "ROMEO:", "parameters": {"max_new_tokens": NUM_NEW}}
    named = {"EndpointName": "any", "ContentType": "application/json"}
    answer = client.invoke_endpoint(
        **named, Body=json.dumps(request), CustomAttributes="trace=1", SessionId="NEW_SESSION"
    )
    assert json.load(answer["Body"]) == {"generated_text": text}
    assert (answer["ContentType"], answer["CustomAttributes"]) == (
        "application/json",
        "trace=1",
    )
    session = answer["NewSessionId"].split(";")[0]

    body = json.dumps({**request, "stream": True})
    answer = client.invoke_endpoint_with_response_stream(
        **named, Body=body, SessionId=session, Accept="text/event-stream"
    )
    assert answer["ContentType"] == "text/event-stream"
    streamed = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])
    events = [json.loads(event.removeprefix(b"data: ")) for event in streamed.split(b"\n\n")[:-1]]
    assert "".join(event["token"]["text"] for event in events) == text

    close = json.dumps({"requestType": "CLOSE"})
    closed = client.invoke_endpoint(**named, Body=close, SessionId=session)
    assert closed["ClosedSessionId"] == session
    assert json.load(closed["Body"]) == {"session_id": session}
    for invoke in (client.invoke_endpoint, client.invoke_endpoint_with_response_stream):
        with pytest.raises(ClientError, match="no such session") as caught:
            invoke(**named, Body=body, SessionId=session)
        assert caught.value.response["Error"]["Code"] == "ModelError"
        assert caught.value.response["OriginalStatusCode"] == 400
