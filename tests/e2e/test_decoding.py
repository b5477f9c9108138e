"""Decoding parameters from HTTP to the engine and back, with every strategy."""

from __future__ import annotations

import json

import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.serving import DEMO, serve

OPTIONS = {
    "none": "option.batching=none\n",
    "dynamic": "option.batching=dynamic\nbatch_size=4\n",
    "paged": "option.batching=paged\n",
    "library": "option.executor=library\nbatch_size=4\n",
}
PROMPT = "ROMEO:\nO, she doth"
NUM_NEW = 16
SEED = 7


@pytest.fixture(scope="module")
def offline():
    """Answers of the offline engine, which other tests compare with transformers."""
    with LLM(DEMO, batching="none", dtype="fp32") as llm:

        def answers(**params):
            sampling = SamplingParams(**{"max_tokens": NUM_NEW, **params})
            return llm.generate(PROMPT, sampling, use_tqdm=False)[0]

        yield answers


@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_parameters_end_to_end(tmp_path, offline, name):
    with serve(tmp_path, f"{OPTIONS[name]}option.dtype=fp32\n") as it:

        def complete(**fields):
            body = {"prompt": PROMPT, "max_tokens": NUM_NEW, "seed": SEED, **fields}
            status, data = it.request("POST", "/v1/completions", body)
            assert status == 200, data
            if not fields.get("stream"):
                return json.loads(data)["choices"]
            lines = [line for line in data.split(b"\n\n") if line.startswith(b"data: {")]
            return [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]

        check_choices(complete, offline)
        check_echo(complete, offline)
        check_search(it, offline)
        check_best_of(it, offline)
        check_structured(complete, offline)
        assert it.stop() == 0


def check_choices(complete, offline):
    """Several choices, whole and streamed; a stop string ends only its choice."""
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
    """Log-probabilities of prompt and answers, also streamed, for two choices."""
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
    """Two answers that follow a schema, and one without repeated n-grams."""
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


def check_search(it, offline):
    best = offline(num_beams=3, n=2, temperature=0).outputs
    parameters = {"num_beams": 3, "n": 2, "details": True, "max_new_tokens": NUM_NEW}
    answer = it.invoke(PROMPT, **parameters)
    (other,) = answer["details"]["best_of_sequences"]
    assert [answer["generated_text"], other["generated_text"]] == [output.text for output in best]


def check_best_of(it, offline):
    sampled = offline(seed=SEED, n=4).outputs
    ranked = sorted(sampled, key=lambda output: -output.cumulative_logprob)
    parameters = {"best_of": 4, "do_sample": True, "seed": SEED, "max_new_tokens": NUM_NEW}
    answer = it.invoke(PROMPT, **parameters, details=True, top_n_tokens=1)
    others = [
        best_of_sequence["generated_text"]
        for best_of_sequence in answer["details"]["best_of_sequences"]
    ]
    assert [answer["generated_text"], *others] == [output.text for output in ranked]
    assert it.invoke(PROMPT, **parameters) == {"generated_text": ranked[0].text}
    tokens, top = answer["details"]["tokens"], answer["details"]["top_tokens"]
    assert all(
        likely[0]["logprob"] >= own["logprob"] for own, likely in zip(tokens, top, strict=True)
    )
