"""Every strategy, over HTTP, gives the offline engine's texts, with all decoding parameters.

Each strategy has one container, which all of its tests use.
"""

from __future__ import annotations

import json
import threading

import pytest
from websockets.sync.client import connect

from container.apis.invocations.upgrade import PATH
from core.configuration.strategy_table import BATCHING_NAMES
from engine import LLM, SamplingParams, StructuredOutputsParams
from tests.container.processes import HANG_S, wait_until
from tests.e2e.serving import DEMO, LONG_ANSWER, long_winded, serve

OPTIONS = {
    **{name: f"option.batching={name}\n" for name in BATCHING_NAMES},
    "dynamic": "option.batching=dynamic\nbatch_size=4\n",
    "library": "option.executor=library\nbatch_size=4\n",
}
PROMPT = "ROMEO:\nO, she doth"
PROMPTS = ("ROMEO:", "First Citizen:\nBefore we proceed any further, hear me", "KING")
NUM_NEW = 16
SEED = 7


@pytest.fixture(scope="module")
def offline():
    """Yield a function that returns the offline engine's answer, which the server's must equal.

    Other tests compare the offline engine with transformers.
    """
    with LLM(DEMO, batching="none", dtype="fp32") as llm:

        def answers(prompt=PROMPT, **params):
            sampling = SamplingParams(**{"max_tokens": NUM_NEW, **params})
            return llm.generate(prompt, sampling, use_tqdm=False)[0]

        yield answers


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    """A container with the strategy of the test's parameter. It must stop with exit code 0."""
    options = f"{OPTIONS[request.param]}option.dtype=fp32\n"
    folder = tmp_path_factory.mktemp("served")
    with serve(folder, options, model=long_winded(folder)) as container:
        yield container
        assert container.stop() == 0


def in_the_sample(batching):
    """Leave `none` and `continuous` to the matrix: other tests here have servers with them."""
    marks = () if batching in ("dynamic", "paged") else pytest.mark.matrix(cases=0)
    return pytest.param(batching, marks=marks)


STRATEGIES = [in_the_sample(batching) for batching in BATCHING_NAMES]
every_strategy = pytest.mark.parametrize("server", STRATEGIES, indirect=True)


@pytest.mark.matrix(cases=2)
@every_strategy
def test_texts_are_the_same_streamed_and_whole(server, offline, request):
    """Several clients ask at once. Then one leaves during its stream, and the next is answered."""
    batching = request.node.callspec.params["server"]
    server.wait_for_log(f"batching: {batching} (")
    answers, streams = {}, {}

    def whole(prompt):
        answers[prompt] = server.invoke(prompt, max_new_tokens=NUM_NEW)["generated_text"]

    def streamed(prompt):
        with server.stream(prompt, max_new_tokens=NUM_NEW) as lines:
            streams[prompt] = list(lines)

    jobs = [threading.Thread(target=do, args=(p,)) for p in PROMPTS for do in (whole, streamed)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    expected = {p: offline(prompt=p, temperature=0).outputs[0].text for p in PROMPTS}
    assert answers == expected
    for prompt, lines in streams.items():
        assert "".join(line["token"]["text"] for line in lines) == expected[prompt]
        assert lines[-1]["generated_text"] == expected[prompt]
        assert not any(line["generated_text"] for line in lines[:-1])

    with (
        server.events() as events,
        server.stream("ROMEO:", max_new_tokens=LONG_ANSWER, ignore_eos=True) as lines,
    ):
        next(lines)
        check_live_page(events, batching)
    answer = server.invoke(PROMPTS[0], max_new_tokens=NUM_NEW)
    assert answer["generated_text"] == expected[PROMPTS[0]]


def check_live_page(events, batching):
    """Check that the events show a request that is running."""
    name, about = next(events)
    assert (name, about["batching"], about["executor"]) == ("engine", batching, "packed")
    running = next(
        data["snapshot"]
        for name, data in events
        if name == "snapshot" and data["snapshot"]["num_running"]
    )
    (sequence,) = running["sequences"]
    assert sequence["phase"] == "decode"
    (held,) = sequence["tables"]  # of its only cache group
    assert sum(length for _, length in held) == running["num_held_blocks"] > 0


@pytest.mark.parametrize("server", [*STRATEGIES, in_the_sample("library")], indirect=True)
def test_decoding_parameters(server, offline):
    def complete(**fields):
        body = {"prompt": PROMPT, "max_tokens": NUM_NEW, "seed": SEED, **fields}
        status, data = server.request("POST", "/v1/completions", body)
        assert status == 200, data
        if not fields.get("stream"):
            return json.loads(data)["choices"]
        lines = [line for line in data.split(b"\n\n") if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]

    check_choices(complete, offline)
    check_echo(complete, offline)
    check_search(server, offline)
    check_best_of(server, offline)
    check_structured(complete, offline)


@every_strategy
def test_a_web_socket_answers_as_http_does_and_frees_the_blocks_of_a_client_that_leaves(server):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": NUM_NEW, "details": True}}
    long = {"max_new_tokens": LONG_ANSWER, "ignore_eos_token": True}
    url = f"ws://127.0.0.1:{server.port}{PATH}"
    with server.post_lines({**body, "stream": True}) as lines:
        streamed = list(lines)
    with connect(url, proxy=None) as client:
        client.send(json.dumps(body))
        client.send(json.dumps({**body, "stream": True}))
        assert json.loads(client.recv(HANG_S)) == server.invoke(PROMPT, **body["parameters"])
        assert [json.loads(client.recv(HANG_S)) for _ in streamed] == streamed
        client.send(json.dumps({"inputs": PROMPT, "parameters": long, "stream": True}))
        assert json.loads(client.recv(HANG_S))["generated_text"] is None
    wait_until(lambda: server.metric("longshore:kv_blocks_held") == 0)


@every_strategy
def test_tokens_are_streamed_as_they_are_generated(server):
    with server.stream("ROMEO:", max_new_tokens=300, ignore_eos=True) as lines:
        assert len(list(lines)) == 300
    with server.stream("ROMEO:", max_new_tokens=LONG_ANSWER, ignore_eos=True) as lines:
        next(lines)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1)


@every_strategy
def test_invalid_input_is_a_4xx_that_names_the_field(server):
    with server.stream("ROMEO:", max_new_tokens=400) as lines:
        next(lines)
        for body, field in (
            ({"inputs": "x", "parameters": {"max_new_token": 4}}, "parameters.max_new_token"),
            ({"inputs": "x", "parameters": {"top_p": 7}}, "parameters.top_p"),
            ({"inputs": "x", "parameters": {"temperature": "hot"}}, "parameters.temperature"),
            ({"inputs": "x " * 9999}, "inputs"),
            (
                {"inputs": "x", "parameters": {"max_new_tokens": 9999}},
                "parameters.max_new_tokens",
            ),
            ({"inputs": []}, "inputs"),
            (b"{", "body"),
        ):
            status, data = server.request("POST", "/invocations", body)
            assert (status, json.loads(data)["field"]) == (400, field)
        assert list(lines)[-1]["generated_text"]


def check_choices(complete, offline):
    """Compare several choices, whole and streamed. Only a choice with the stop string is cut."""
    texts = [output.text for output in offline(seed=SEED, n=3).outputs]
    assert [made["text"] for made in complete(n=3)] == texts
    parts = [texts[1][at : at + 4] for at in range(4, 12)]
    stop = next(part for part in parts if part not in texts[0] + texts[2])
    expected = [texts[0], texts[1].partition(stop)[0], texts[2]]
    pieces, reasons = ["", "", ""], {}
    for choice in complete(n=3, stop=[stop], stream=True):
        pieces[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            assert choice["index"] not in reasons, "every choice ends once"
            reasons[choice["index"]] = choice["finish_reason"]
    assert pieces == expected
    assert reasons == {0: "length", 1: "stop", 2: "length"}


def check_echo(complete, offline):
    """Compare the log-probabilities of the prompt and of two choices, whole and streamed."""
    output = offline(seed=SEED, n=2, logprobs=2, prompt_logprobs=2)
    scores = logprobs_of(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    for streamed in (False, True):
        got = [[], []]
        for choice in complete(n=2, echo=True, logprobs=2, stream=streamed):
            if choice["logprobs"]:
                got[choice["index"]] += choice["logprobs"]["token_logprobs"]
        for choice, answer in zip(got, output.outputs, strict=True):
            own = logprobs_of(answer.token_ids, answer.logprobs)
            assert choice[0] is None
            assert choice[1:] == pytest.approx(scores + own, abs=1e-3)


def logprobs_of(token_ids, named):
    return [logprobs[id].logprob for id, logprobs in zip(token_ids, named, strict=True)]


def check_structured(complete, offline):
    """Compare two answers that follow a schema, and one in which no token is repeated."""
    schema = {"type": "array", "items": {"enum": ["Romeo", "Juliet"]}, "minItems": 2, "maxItems": 4}
    form = StructuredOutputsParams(json=schema)
    expected = [
        output.text
        for output in offline(seed=SEED, n=2, max_tokens=160, structured_outputs=form).outputs
    ]
    format = {"type": "json_schema", "json_schema": {"name": "lovers", "schema": schema}}
    choices = complete(n=2, max_tokens=160, response_format=format)
    assert [choice["text"] for choice in choices] == expected
    for choice in choices:
        assert choice["finish_reason"] == "stop"
        assert 2 <= len(json.loads(choice["text"])) <= 4
    (text,) = (output.text for output in offline(temperature=0, no_repeat_ngram_size=1).outputs)
    assert complete(temperature=0, no_repeat_ngram_size=1)[0]["text"] == text


def check_search(container, offline):
    best = offline(num_beams=3, n=2, temperature=0).outputs
    parameters = {"num_beams": 3, "n": 2, "details": True, "max_new_tokens": NUM_NEW}
    answer = container.invoke(PROMPT, **parameters)
    (other,) = answer["details"]["best_of_sequences"]
    assert [answer["generated_text"], other["generated_text"]] == [output.text for output in best]


def check_best_of(container, offline):
    sampled = offline(seed=SEED, n=4).outputs
    ranked = sorted(sampled, key=lambda output: -output.cumulative_logprob)
    parameters = {"best_of": 4, "do_sample": True, "seed": SEED, "max_new_tokens": NUM_NEW}
    answer = container.invoke(PROMPT, **parameters, details=True, top_n_tokens=1)
    others = [
        best_of_sequence["generated_text"]
        for best_of_sequence in answer["details"]["best_of_sequences"]
    ]
    assert [answer["generated_text"], *others] == [output.text for output in ranked]
    assert container.invoke(PROMPT, **parameters) == {"generated_text": ranked[0].text}
    tokens, top = answer["details"]["tokens"], answer["details"]["top_tokens"]
    assert all(
        likely[0]["logprob"] >= own["logprob"] for own, likely in zip(tokens, top, strict=True)
    )
