"""Steps that give several tokens, over HTTP: streams carry them as they come, and lose none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import LLM, SamplingParams
from tests.container.processes import wait_until
from tests.e2e.serving import DEMO, Container, serve

NUM_NEW = 90
PROMPT = "ROMEO: Now is the winter of our discontent.\n" * 4
MESSAGES = [{"role": "user", "content": PROMPT}]
OPTIONS = "option.dtype=fp32\noption.speculative_method=ngram\noption.speculation=always\n"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
LENGTHS = {"max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("served"), OPTIONS) as container:
        yield container
        assert container.stop() == 0


def records(server: Container, path: str, **body: Any) -> list[dict[str, Any]]:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    status, data = server.request("POST", path, LENGTHS | usage | body)
    assert status == 200, data
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_text_and_chat(server):
    """The same text as without drafts, in fewer records than it has tokens."""
    for path, body, text_of in (
        ("/v1/completions", {"prompt": PROMPT}, lambda choice: choice["text"]),
        ("/v1/chat/completions", {"messages": MESSAGES},
         lambda choice: choice["delta"].get("content") or ""),
    ):  # fmt: skip
        *found, last = records(server, path, **body)
        texts = [text_of(choice) for record in found for choice in record["choices"]]
        assert last["usage"]["completion_tokens"] == NUM_NEW
        assert sum(map(bool, texts)) < 2 / 3 * NUM_NEW
        status, whole = server.request("POST", path, LENGTHS | body)
        assert status == 200
        [choice] = json.loads(whole)["choices"]
        expected = choice["text"] if "text" in choice else choice["message"]["content"]
        assert "".join(texts) == expected
        if path == "/v1/completions":
            with LLM(DEMO, dtype="fp32") as llm:
                plain = llm.generate(PROMPT, SamplingParams(**LENGTHS), use_tqdm=False)
            assert expected == plain[0].outputs[0].text
    wait_until(lambda: server.metric(ACCEPTED) > 2 / 3 * NUM_NEW)


def test_a_stop_string_within_accepted_tokens_ends_the_stream_there(server):
    _, data = server.request("POST", "/v1/completions", LENGTHS | {"prompt": PROMPT})
    whole = json.loads(data)["choices"][0]["text"]
    stop = whole[100:106]
    *found, last = records(server, "/v1/completions", prompt=PROMPT, stop=stop)
    text = "".join(choice["text"] for record in found for choice in record["choices"])
    reasons = [choice["finish_reason"] for record in found for choice in record["choices"]]
    assert reasons[-1] == "stop"
    assert text == whole[: whole.index(stop)]
    assert last["usage"]["completion_tokens"] < NUM_NEW
