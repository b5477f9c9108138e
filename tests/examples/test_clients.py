"""Each client prints the same text twice: whole, and joined from a stream."""

from __future__ import annotations

import json

import pytest

from tests.e2e.serving import ROOT, Container
from tests.examples.conftest import MODULE, NUM_NEW, run_example


@pytest.fixture(scope="module")
def answer_text(container: Container) -> str:
    """Return the model's continuation of "ROMEO:"."""
    return container.invoke("ROMEO:", max_new_tokens=NUM_NEW)["generated_text"]


def chat(container: Container, content: str) -> str:
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_NEW,
        "temperature": 0,
    }
    status, data = container.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    return json.loads(data)["choices"][0]["message"]["content"]


def test_curl_client(container: Container, answer_text: str) -> None:
    script = str(ROOT / "examples" / "clients" / "curl.sh")
    whole, *lines = run_example(script, f"http://127.0.0.1:{container.port}").splitlines()
    assert json.loads(whole) == {"generated_text": answer_text}
    records = [json.loads(line) for line in lines]
    assert len(records) == NUM_NEW
    assert "".join(record["token"]["text"] for record in records) == answer_text


@pytest.mark.parametrize("name", ["requests_client", "boto3_client"])
def test_text_client(container: Container, answer_text: str, name: str) -> None:
    module = f"examples.clients.{name}"
    text = run_example(*MODULE, module, "--url", f"http://127.0.0.1:{container.port}")
    assert text == f"{answer_text}\n{answer_text}\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [("openai_client", "Speak, Romeo."), ("langchain_client", "Speak of love.")],
)
def test_chat_client(container: Container, name: str, content: str) -> None:
    module = f"examples.clients.{name}"
    text = run_example(*MODULE, module, "--url", f"http://127.0.0.1:{container.port}")
    answer_text = chat(container, content)
    assert text == f"{answer_text}\n{answer_text}\n"


def test_requirements_match_those_of_the_tests() -> None:
    required = (ROOT / "examples" / "requirements.txt").read_text().splitlines()[1:]
    assert set(required) <= set((ROOT / "constraints.txt").read_text().splitlines())
