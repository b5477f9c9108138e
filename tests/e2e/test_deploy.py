"""`deploy invoke` and `deploy stream` against a container with SageMaker's runtime routes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deploy.__main__ import main
from tests.e2e.serving import Container, serve


@pytest.fixture(scope="module")
def container(tmp_path_factory) -> Iterator[Container]:
    with serve(tmp_path_factory.mktemp("deploy"), "option.local_runtime_api=true\n") as container:
        yield container


@pytest.fixture(autouse=True)
def _runtime(container, monkeypatch) -> None:
    url = f"http://127.0.0.1:{container.port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "eu-west-1")


def test_invoke_and_stream_give_the_same_text(container, capsys):
    arguments = ["--name", "any", "ROMEO:", "--max-new-tokens", "12"]
    assert main(["invoke", *arguments]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole == container.invoke("ROMEO:", max_new_tokens=12)
    assert main(["stream", *arguments]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 12
    assert "".join(line["token"]["text"] for line in lines) == whole["generated_text"]
    assert lines[-1]["generated_text"] == whole["generated_text"]


def test_request_body_as_json(capsys):
    body = {"messages": [{"role": "user", "content": "Speak!"}], "max_tokens": 3}
    assert main(["invoke", "--name", "any", "--body", json.dumps(body)]) == 0
    assert json.loads(capsys.readouterr().out)["object"] == "chat.completion"


def test_container_errors_are_shown(capsys):
    body = json.dumps({"inputs": "x", "parameters": {"top_p": 7}})
    for command in ("invoke", "stream"):
        assert main([command, "--name", "any", "--body", body]) == 1
        assert "parameters.top_p" in capsys.readouterr().err
