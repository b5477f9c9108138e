"""Custom input and output formatters, with a fake engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from container.apis.generation.formatters import Formatter, Functions, load_formatters
from container.front_end.app import create_app
from container.launch.preparation import prepare
from container.wire.engine_client import EngineClient
from core.configuration.options import Options
from core.errors import ConfigurationError
from core.protocol.messages import Submit
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.configurations import Load
from tests.container.fake_engine import FakeEngine, fails
from tests.escaping import ESCAPING

Formatted = Callable[..., FlaskClient]
TEXT = "Hi there"
"""The fake engine's answer."""


@pytest.fixture
def formatted(client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate) -> Formatted:
    """Return a function that makes a test client of the application with given formatters."""

    def formatted(input: Formatter | None = None, output: Formatter | None = None) -> FlaskClient:
        functions = Functions(input, output)
        return create_app(client, tokenizer, Options(), "demo", template, functions).test_client()

    return formatted


def prompt_text(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    message = engine.of_type(Submit)[-1]
    assert isinstance(message, Submit)
    return tokenizer.decode(message.prompt_token_ids)


def rename(payload: dict[str, Any]) -> dict[str, Any]:
    payload["inputs"] = payload.pop("question")
    return payload


def test_a_custom_request_schema(
    formatted: Formatted, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    http = formatted(rename)
    response = http.post("/invocations", json={"question": "who?"})
    assert response.get_json() == {"generated_text": TEXT}
    assert prompt_text(engine, tokenizer) == "who?"
    response = http.post("/invocations", json={"question": "who?", "parameter": {}})
    assert (response.status_code, response.get_json()["field"]) == (400, "parameter")


def test_formatters_get_the_tokenizer(
    formatted: Formatted, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def chat(payload: dict[str, Any], tokenizer: Any, **_: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": payload["question"]}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert tokens == tokenizer.encode(prompt)
        assert tokenizer.decode(tokens) == prompt
        return {"inputs": prompt}

    assert formatted(chat).post("/invocations", json={"question": "q"}).status_code == 200
    assert prompt_text(engine, tokenizer) == "u:q;a:"
    refusing = formatted(
        lambda payload, tokenizer: tokenizer.apply_chat_template([{"role": "robot", "content": ""}])
    )
    response = refusing.post("/invocations", json={})
    assert (response.status_code, response.get_json()["field"]) == (400, "messages")


@pytest.mark.parametrize("body", [
    {"inputs": "a"},
    {"prompt": "a", "max_tokens": 9},
    {"messages": [{"role": "user", "content": "a"}]},
])  # fmt: skip
def test_output_formatters_apply_to_every_schema(
    formatted: Formatted, body: dict[str, Any]
) -> None:
    http = formatted(output=lambda data: {"seen": sorted(data), "mine": True})
    plain = formatted(output=lambda data: data).post("/invocations", json=body).get_json()
    answer = http.post("/invocations", json=body)
    assert answer.get_json() == {"seen": sorted(plain), "mine": True}
    lines = http.post("/invocations", json={**body, "stream": True}).data.splitlines()
    assert len(lines) > 1
    assert all(json.loads(line)["mine"] for line in lines)


def test_text_is_sent_unchanged(formatted: Formatted) -> None:
    http = formatted(output=lambda data: f"<{data['generated_text'] or ''}>\n")
    assert http.post("/invocations", json={"inputs": "a"}).data == f"<{TEXT}>\n".encode()
    body = {"inputs": "a", "stream": True}
    lines = http.post("/invocations", json=body).data.decode().split("\n")
    assert lines == ["<>"] * len(TEXT) + [f"<{TEXT}>", ""]
    events = http.post("/invocations", json=body, headers={"Accept": "text/event-stream"})
    assert events.data.decode().split("\n\n") == lines


def test_only_invocations_use_formatters(formatted: Formatted) -> None:
    def refuse(data: Any) -> Any:
        raise AssertionError

    http = formatted(refuse, refuse)
    body = {"prompt": "a", "max_tokens": 9}
    assert http.post("/v1/completions", json=body).get_json()["choices"][0]["text"] == TEXT


def raises(kind: type[BaseException]) -> Formatter:
    def formatter(data: object) -> object:
        raise kind("why")

    return formatter


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda data: 1 / 0, "ZeroDivisionError: division by zero"),
        *((raises(kind), f"{kind.__name__}: why") for kind in ESCAPING),
        (lambda data: object(), "TypeError"),
    ],
)
def test_formatter_exceptions(formatted: Formatted, function: Formatter, message: str) -> None:
    for which, http in (("input", formatted(function)), ("output", formatted(output=function))):
        response = http.post("/invocations", json={"inputs": "a"})
        assert response.status_code == 424
        assert response.get_json()["error"].startswith(f"{which}_formatter: {message}")
    streamed = formatted(output=function).post("/invocations", json={"inputs": "a", "stream": True})
    assert streamed.status_code == 424, "the first line already fails"


def test_an_input_formatter_must_return_a_dict(formatted: Formatted) -> None:
    response = formatted(lambda data: ["a"]).post("/invocations", json={"inputs": "a"})
    assert (response.status_code, response.get_json()["error"]) == (
        424, "input_formatter: returned ['a'] instead of a dict",
    )  # fmt: skip


def test_errors_are_not_formatted(formatted: Formatted, engine: FakeEngine) -> None:
    engine.script = fails("failed", "RuntimeError: x", after=[72])
    http = formatted(output=lambda data: {"mine": True})
    lines = http.post("/invocations", json={"inputs": "a", "stream": True}).data.splitlines()
    assert json.loads(lines[0]) == {"mine": True}
    assert json.loads(lines[-1])["token"]["error_msg"] == "RuntimeError: x"


class TestFiles:
    @pytest.fixture(autouse=True)
    def _clean_modules(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(Path(__file__).parents[3])
        monkeypatch.setattr(sys, "path", [*sys.path])
        yield
        sys.modules.pop("model", None)

    CODE = (
        "from djl_python.encode_decode import decode\n"
        "from djl_python.input_parser import input_formatter\n"
        "from djl_python.output_formatter import output_formatter\n"
        "@input_formatter\ndef mine(decoded_payload, tokenizer=None, **kwargs): ...\n"
    )

    def test_decorated_functions_are_found(self, tmp_path: Path) -> None:
        path = tmp_path / "folder" / "model.py"
        path.parent.mkdir()
        path.write_text(f"{self.CODE}alias = mine\n@output_formatter\ndef other(data): ...\n")
        functions = load_formatters(path, str(tmp_path / "library"))
        found = (functions.input, functions.output)
        assert [getattr(function, "__name__", None) for function in found] == ["mine", "other"]
        assert Path(os.getcwd()) == path.parent
        assert str(tmp_path / "library") in sys.path
        path.write_text(self.CODE)
        assert load_formatters(path, "").output is None

    def test_a_model_directory_with_formatters(
        self, load: Load, tmp_path: Path, tokenizer_dir: Path
    ) -> None:
        path = tmp_path / "model.py"
        path.write_text(self.CODE)
        for entry in ("", "option.entryPoint=model.py\n",
                      "option.entryPoint=djl_python.lmi_vllm.vllm_async_service\n"):  # fmt: skip
            prepared = prepare(load(f"{entry}option.model_id={tokenizer_dir}"), tmp_path)
            assert (prepared.task.kind, prepared.formatters) == ("generation", path)
        path.write_text(f"from json import *\n{self.CODE}")
        assert prepare(load(f"option.model_id={tokenizer_dir}"), tmp_path).formatters == path
        path.write_text("x = 1\n")
        assert prepare(load(f"option.model_id={tokenizer_dir}"), tmp_path).formatters is None

    @pytest.mark.parametrize(
        ("more", "text", "message"),
        [
            ("1 / 0\n", "", "model.py:6: ZeroDivisionError"),
            ("raise GeneratorExit\n", "", "model.py:6: GeneratorExit"),
            ("import no_such_thing\n", "", "name it in requirements.txt"),
            (
                "from djl_python.output_formatter import RequestOutput\n",
                "",
                "py:6: ImportError",
            ),
            (
                "@input_formatter\ndef second(data): ...\n",
                "",
                "has 2 functions with @input_formatter",
            ),
            (
                "@output_formatter\nasync def later(data): ...\n",
                "",
                "is async; make it a plain function",
            ),
            ("def handle(inputs): ...\n", "", "define one or the other"),
            (
                "@prediction_handler\ndef predict(x, model): ...\n",
                "",
                "model.py:6: @prediction_handler",
            ),
            ("", "option.task=text-embedding", "formatters work only for text generation"),
            ("", "option.my_threshold=1", "unknown option.my_threshold"),
        ],
    )
    def test_files_that_cannot_be_loaded(
        self,
        load: Load,
        tmp_path: Path,
        tokenizer_dir: Path,
        more: str,
        text: str,
        message: str,
    ) -> None:
        (tmp_path / "model.py").write_text(self.CODE + more)
        with pytest.raises(ConfigurationError) as caught:
            prepare(load(f"option.model_id={tokenizer_dir}\n{text}\n"), tmp_path)
        assert message in str(caught.value)

    def test_formatters_need_a_model(self, load: Load, tmp_path: Path) -> None:
        (tmp_path / "model.py").write_text(self.CODE)
        with pytest.raises(ConfigurationError, match="has formatters but no model"):
            prepare(load(""), tmp_path)
