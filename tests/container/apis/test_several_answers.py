"""Several answers to one prompt in every API, with a fake engine: indices, ends and counts."""

from __future__ import annotations

import json
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient

from core.output import Output
from core.protocol.messages import Abort, Step, Submit
from core.sampling import Finish
from core.text.tokenizer import Tokenizer
from tests.container.apis.test_chat import TOOLS, USER, events, submitted
from tests.container.conftest import EOS, Serve, eventually
from tests.container.fake_engine import FakeEngine, fails, says
from tests.container.invocations import invoke, records, stream

CHAT = ("/v1/chat/completions", {"messages": [USER]})
PROMPT = ("/v1/completions", {"prompt": "Q"})


@pytest.fixture
def three(engine: FakeEngine, tokenizer: Tokenizer) -> list[str]:
    """Make the engine answer with three texts, one token of each per step. Return the texts."""
    texts = ["Hi there", "\u00e9!", "Nothing. At all"]
    engine.script = says(*([*tokenizer.encode(text), EOS] for text in texts))
    return texts


def choices_of(http: FlaskClient, api: tuple[str, dict[str, Any]], **fields: Any) -> dict[int, Any]:
    """Return text, finish reason and number of ends of each choice, streamed or not."""
    path, body = api
    response = http.post(path, json={**body, "max_tokens": 50, **fields})
    assert response.status_code == 200, response.get_json()
    choices: dict[int, Any] = {}
    for record in events(response) if fields.get("stream") else [response.get_json()]:
        for choice in record["choices"]:
            generated = choice.get("delta", choice.get("message", choice))
            text, reason, ends = choices.get(choice["index"], ("", None, 0))
            choices[choice["index"]] = (
                text + (generated.get("text") or generated.get("content") or ""),
                choice["finish_reason"] or reason,
                ends + (choice["finish_reason"] is not None),
            )
    return choices


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", [CHAT, PROMPT])
def test_choices_in_openai_responses(
    http: FlaskClient, three: list[str], api: Any, streamed: bool
) -> None:
    choices = choices_of(http, api, n=3, stream=streamed)
    assert choices == {index: (text, "stop", 1) for index, text in enumerate(three)}


def test_choices_are_interleaved(http: FlaskClient, three: list[str]) -> None:
    chunks = events(http.post(CHAT[0], json={**CHAT[1], "n": 2, "stream": True, "max_tokens": 3}))
    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert indices != sorted(indices)
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("streamed", [False, True])
def test_usage_counts_the_prompt_once_and_every_token(http: FlaskClient, streamed: bool) -> None:
    """The three answers have 9, 4 and 16 tokens, each with its end token."""
    with_usage = {"stream_options": {"include_usage": True}} if streamed else {}
    for fields, expected in (({"n": 3}, 9 + 4 + 16), ({"n": 1, "best_of": 3}, 9 + 4 + 16)):
        body = {"prompt": "QQ", "max_tokens": 50, "stream": streamed, **fields, **with_usage}
        response = http.post("/v1/completions", json=body)
        usage = (events(response)[-1] if streamed else response.get_json())["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, expected)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", [CHAT, PROMPT])
def test_a_stop_string_ends_only_its_choice(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer, api: Any, streamed: bool
) -> None:
    """The answer with the stop string is aborted in the engine, and its later tokens are dropped.

    The other answer continues.
    """
    generated = [tokenizer.encode("x.y"), tokenizer.encode("ab")]

    def script(submit: Submit):
        for index, ids in ((0, generated[0][:2]), (1, generated[1][:1])):
            yield Step([(submit.id, Output(0, tuple(ids), (-0.5,) * len(ids), index=index))])

    engine.script = script

    def go_on() -> None:
        (abort,) = engine.of_type(Abort)
        assert isinstance(abort, Abort)
        assert (abort.index, abort.reason) == (0, "stop_string")
        for index, id in ((0, generated[0][2]), (1, generated[1][1])):
            engine.send(Step([(abort.id, Output(0, (id,), (-0.5,), Finish.LENGTH, index))]))

    waiter = gevent.spawn(lambda: (eventually(lambda: engine.of_type(Abort)), go_on()))
    choices = choices_of(http, api, n=2, stop=["."], stream=streamed)
    waiter.get()
    assert choices == {0: ("x", "stop", 1), 1: ("ab", "length", 1)}
    assert len(engine.of_type(Abort)) == 1


def test_the_likeliest_answer_comes_first_in_the_text_schema(
    http: FlaskClient, three: list[str]
) -> None:
    """The answers of the fake engine have logprobs of -0.5, -1 and -1.5 per token.

    The second answer is short, so the sum of its logprobs is the highest.
    """
    answer = invoke(http, best_of=3, details=True, max_new_tokens=50).get_json()
    others = answer["details"]["best_of_sequences"]
    ranked = [answer["generated_text"], *(sequence["generated_text"] for sequence in others)]
    assert ranked == [three[1], three[0], three[2]]
    assert [sequence["finish_reason"] for sequence in others] == ["eos_token"] * 2
    assert [sequence["generated_tokens"] for sequence in others] == [9, 16]
    for parameters in ({"n": 3}, {"num_return_sequences": 3}):
        same = invoke(http, details=True, max_new_tokens=50, **parameters).get_json()
        assert same == answer
    assert invoke(http, best_of=3, max_new_tokens=50).get_json() == {"generated_text": three[1]}
    last = records(stream(http, best_of=3, max_new_tokens=50))[-1]
    assert last["generated_text"] == three[1]


def test_every_answer_has_the_full_text(http: FlaskClient, three: list[str]) -> None:
    answer = invoke(http, n=2, details=True, return_full_text=True, max_new_tokens=50).get_json()
    (other,) = answer["details"]["best_of_sequences"]
    assert [answer["generated_text"], other["generated_text"]] == ["Q" + three[1], "Q" + three[0]]


def test_a_batch_with_several_answers_per_input(http: FlaskClient, three: list[str]) -> None:
    parameters = {"n": 2, "details": True, "max_new_tokens": 50}
    response = http.post("/invocations", json={"inputs": ["a", "b"], "parameters": parameters})
    for result in response.get_json():
        assert result["generated_text"] == three[1]
        assert len(result["details"]["best_of_sequences"]) == 1


def test_each_choice_has_its_own_tool_calls(
    serve: Serve, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    texts = ['<tool_call>{"name": "f", "arguments": {}}</tool_call>', "No call."]
    engine.script = says(*([*tokenizer.encode(text), EOS] for text in texts))
    http = serve(tool_call_parser="hermes")
    body = {"messages": [USER], "tools": TOOLS, "n": 3}
    choices = http.post(CHAT[0], json=body).get_json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "stop"]
    assert [bool(choice["message"].get("tool_calls")) for choice in choices] == [True, False, False]
    engine.script = says([*tokenizer.encode(texts[0]), EOS])
    choices = http.post(CHAT[0], json=body).get_json()["choices"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_parameters_sent_to_the_engine(http: FlaskClient, engine: FakeEngine) -> None:
    fields = {"n": 2, "num_beams": 3, "length_penalty": 0.5, "early_stopping": True}
    assert http.post(PROMPT[0], json={**PROMPT[1], **fields}).status_code == 200
    params = submitted(engine).params
    assert (params.n, params.beam_width, params.length_penalty) == (2, 3, 0.5)
    assert params.early_stopping is True
    http.post(CHAT[0], json={**CHAT[1], "logprobs": True, "top_logprobs": 4, "n": 2})
    assert (submitted(engine).params.logprobs, submitted(engine).params.n) == (4, 2)
    http.post(PROMPT[0], json={**PROMPT[1], "echo": True, "logprobs": 3})
    assert (submitted(engine).params.logprobs, submitted(engine).params.prompt_logprobs) == (3, 3)
    http.post(PROMPT[0], json={**PROMPT[1], "logprobs": 3})
    assert submitted(engine).params.prompt_logprobs is None
    invoke(http, details=True, decoder_input_details=True)
    assert (submitted(engine).params.logprobs, submitted(engine).params.prompt_logprobs) == (
        None,
        0,
    )
    invoke(http, decoder_input_details=True)
    assert submitted(engine).params.prompt_logprobs is None, "without details, it has no effect"


def test_engine_errors_name_the_clients_parameter(http: FlaskClient, engine: FakeEngine) -> None:
    engine.script = fails("rejected", "an encoder-decoder model has none", "prompt_logprobs")
    text = invoke(http, details=True, decoder_input_details=True).get_json()
    assert text["field"] == "parameters.decoder_input_details"
    echoed = http.post(PROMPT[0], json={**PROMPT[1], "echo": True, "logprobs": 0})
    assert (echoed.status_code, echoed.get_json()["error"]["param"]) == (400, "logprobs")
    answered = http.post(CHAT[0], json={**CHAT[1], "prompt_logprobs": 0})
    assert answered.get_json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.usefixtures("three")
def test_a_failure_after_one_answer_has_ended(
    http: FlaskClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def script(submit: Submit):
        yield Step([(submit.id, Output(0, (65,), (-0.5,), Finish.LENGTH, 0))])
        yield from fails("failed", "no luck")(submit)

    engine.script = script
    whole = http.post(PROMPT[0], json={**PROMPT[1], "n": 2})
    assert (whole.status_code, whole.get_json()["error"]["message"]) == (424, "no luck")
    data = http.post(PROMPT[0], json={**PROMPT[1], "n": 2, "stream": True}).get_data(as_text=True)
    last = json.loads(data.split("\n\n")[-3].removeprefix("data: "))
    assert last["error"]["message"] == "no luck"
