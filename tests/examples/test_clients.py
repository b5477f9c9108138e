"""The clients print the same text twice: whole, and put together from a stream."""

from __future__ import annotations

import json

import pytest

from tests.e2e.serving import ROOT, Container
from tests.examples.conftest import MODULE, NUM_NEW, run_example


@pytest.fixture(scope="module")
def said(container: Container) -> str:
    """After ROMEO:"""
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


def test_curl(container: Container, said: str) -> None:
    script = str(ROOT / "examples" / "clients" / "curl.sh")
    whole, *lines = run_example(script, f"http://127.0.0.1:{container.port}").splitlines()
    assert json.loads(whole) == {"generated_text": said}
    records = [json.loads(line) for line in lines]
    assert len(records) == NUM_NEW
    assert "".join(record["token"]["text"] for record in records) == said


@pytest.mark.parametrize("name", ["requests_client", "boto3_client"])
def test_text(container: Container, said: str, name: str) -> None:
    module = f"examples.clients.{name}"
    text = run_example(*MODULE, module, "--url", f"http://127.0.0.1:{container.port}")
    assert text == f"{said}\n{said}\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [("openai_client", "Speak, Romeo."), ("langchain_client", "Speak of love.")],
)
def test_chat(container: Container, name: str, content: str) -> None:
    module = f"examples.clients.{name}"
    text = run_example(*MODULE, module, "--url", f"http://127.0.0.1:{container.port}")
    said = chat(container, content)
    assert text == f"{said}\n{said}\n"


def test_requirements_are_those_of_the_tests() -> None:
    required = (ROOT / "examples" / "requirements.txt").read_text().splitlines()[1:]
    assert set(required) <= set((ROOT / "constraints.txt").read_text().splitlines())
