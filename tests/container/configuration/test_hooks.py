"""AWS's hooks, written as its documentation shows them, around the routes of a fake engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask.testing import FlaskClient

from container.front_end.app import create_app, create_task_app
from container.hooks.load import Hooks, load_hooks
from container.hooks.load import main as check
from container.isolation.helper import Helper
from container.launch.preparation import prepare
from container.wire.engine_client import EngineClient
from core.configuration.options import Options, make_options
from core.configuration.task import Task
from core.errors import ConfigurationError
from core.protocol.messages import Abort, Submit
from core.text.chat_template import ChatTemplate
from core.text.tokenizer import Tokenizer
from tests.container.configurations import Load, refusal
from tests.container.conftest import eventually
from tests.container.fake_engine import FakeEngine, stalls
from tests.escaping import ESCAPING

Hooked = Callable[..., FlaskClient]
TEXT = "Hi there"


@pytest.fixture
def hooked(
    client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate, helper: Helper
) -> Hooked:
    """Return a function that makes a test client of the application with given hooks."""

    def hooked(**hooks: Any) -> FlaskClient:
        app = create_app(
            client, tokenizer, Options(), "demo", template, helper=helper, hooks=Hooks(**hooks)
        )
        return app.test_client()

    return hooked


class HTTPException(Exception):
    """An exception with the attributes of FastAPI's HTTPException."""

    def __init__(self, status_code: int, detail: str) -> None:
        self.status_code = status_code
        self.detail = detail


async def with_default(request: Any) -> Any:
    if request.url.path == "/invocations":
        body = await request.json()
        if "prompt" not in body:
            raise HTTPException(400, "Missing 'prompt' field")
        body.setdefault("max_tokens", 3)
        request._body = json.dumps(body).encode()
    return request


async def with_metadata(response: Any) -> Any:
    response.headers["X-Model-Version"] = "7"
    if hasattr(response, "body") and response.status_code == 200:
        response.body = json.dumps({**json.loads(response.body), "version": 7}).encode()
    return response


def last_prompt(engine: FakeEngine) -> Submit:
    message = engine.of_type(Submit)[-1]
    assert isinstance(message, Submit)
    return message


def test_pre_and_post_process(hooked: Hooked, engine: FakeEngine) -> None:
    http = hooked(pre_process_hook=with_default, post_process_hook=with_metadata)
    answer = http.post("/invocations", json={"prompt": "a"})
    assert (answer.get_json()["version"], answer.headers["X-Model-Version"]) == (7, "7")
    assert answer.get_json()["choices"][0]["text"] == TEXT[:3]
    assert answer.content_length == len(answer.data)
    assert last_prompt(engine).params.max_tokens == 3
    assert http.get("/ping").get_json() == {"status": "healthy", "version": 7}
    missing = http.post("/invocations", json={})
    assert (missing.status_code, missing.get_json()["error"]) == (400, "Missing 'prompt' field")


def test_errors_of_routes_are_responses_to_hooks(hooked: Hooked) -> None:
    http = hooked(post_process_hook=with_metadata)
    for path, status in (("/invocations", 400), ("/v1/nope", 404)):
        answer = http.post(path, json={"prompt": 1})
        assert (answer.status_code, answer.headers["X-Model-Version"]) == (status, "7")
        assert "error" in answer.get_json()


def test_hooks_see_no_body_of_a_stream(hooked: Hooked) -> None:
    http = hooked(post_process_hook=with_metadata)
    answer = http.post("/invocations", json={"prompt": "a", "stream": True, "max_tokens": 9})
    assert answer.headers["X-Model-Version"] == "7"
    texts = [json.loads(line)["choices"][0]["text"] for line in answer.data.splitlines()]
    assert "".join(texts) == TEXT


def test_middleware_is_around_the_routes(hooked: Hooked) -> None:
    def named(name: str) -> Any:
        async def middleware(request: Any, call_next: Any) -> Any:
            order = request.state.__dict__.setdefault("order", [])
            order.append(name)
            response = await call_next(request)
            response.headers["X-Order"] = ",".join([*order, name])
            order.append(name)
            return response

        return middleware

    http = hooked(throttle_hook=named("t"), pre_post_process_hook=named("p"))
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
    assert answer.headers["X-Order"] == "t,p,p,t"
    assert answer.get_json()["choices"][0]["text"] == TEXT


def test_a_throttle_may_answer_instead_of_the_route(hooked: Hooked, engine: FakeEngine) -> None:
    async def refuse(request: Any, call_next: Any) -> Any:
        if request.method == "POST":
            return SimpleNamespace(status_code=429, body=b"slow", headers={"x-limit": "1"})
        return await call_next(request)

    http = hooked(throttle_hook=refuse)
    answer = http.post("/invocations", json={"inputs": "a"})
    assert (answer.status_code, answer.data, answer.headers["x-limit"]) == (429, b"slow", "1")
    assert http.get("/ping").status_code == 200
    assert not engine.of_type(Submit)


def test_a_stream_that_a_hook_replaces_is_aborted(hooked: Hooked, engine: FakeEngine) -> None:
    engine.script = stalls([72])

    async def replace(request: Any, call_next: Any) -> Any:
        await call_next(request)
        return {"mine": True}

    answer = hooked(pre_post_process_hook=replace).post(
        "/invocations", json={"inputs": "a", "stream": True}
    )
    assert answer.get_json() == {"mine": True}
    eventually(lambda: engine.of_type(Abort))


def forgets(response: Any) -> None:
    response.headers["x-mine"] = "1"


def divides(response: Any) -> Any:
    return response.status_code / 0


@pytest.mark.parametrize(
    ("function", "message"),
    [(forgets, "returned None instead of a response"), (divides, "division by zero")],
)
def test_a_stream_whose_hook_fails_is_aborted(
    hooked: Hooked, engine: FakeEngine, function: Any, message: str
) -> None:
    engine.script = stalls([72])
    answer = hooked(post_process_hook=function).post(
        "/invocations", json={"inputs": "a", "stream": True}
    )
    assert answer.status_code == 424
    error = answer.get_json()["error"]
    assert error.startswith("option.post_process_hook: ")
    assert message in error
    eventually(lambda: engine.of_type(Abort))


async def bare_ping() -> Any:
    return {"status": "mine"}


async def ping_with_request(request: Any) -> Any:
    return {"status": request.url.path}


def test_ping(hooked: Hooked, engine: FakeEngine, client: EngineClient) -> None:
    for function, status in ((bare_ping, "mine"), (ping_with_request, "/ping")):
        http = hooked(ping_hook=function)
        assert http.get("/ping").get_json() == {"status": status}
        assert http.get("/health").get_json() == {"status": "healthy"}
    engine.close()
    http = hooked(ping_hook=bare_ping)
    eventually(lambda: not client.health().healthy)
    assert http.get("/ping").status_code == 503, "a hook does not hide a dead engine"


async def waits(request: Any) -> Any:
    await asyncio.sleep(0)
    await asyncio.sleep(1)


def raises(kind: type[BaseException]) -> Any:
    def hook(request: Any) -> Any:
        raise kind("why")

    return hook


def raises_later(kind: type[BaseException]) -> Any:
    async def hook(request: Any) -> Any:
        await request.body()
        raise kind("why")

    return hook


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda request: 1 / 0, "ZeroDivisionError: division by zero"),
        *((raises(kind), f"{kind.__name__}: why") for kind in ESCAPING),
        (raises_later(ESCAPING[0]), "PanicException: why"),
        (lambda request: {"a": 1}, "returned {'a': 1} instead of its request"),
        (waits, "RuntimeError"),
    ],
)
def test_failures(hooked: Hooked, function: Any, message: str) -> None:
    answer = hooked(pre_process_hook=function).post("/invocations", json={"inputs": "a"})
    assert answer.status_code == 424
    assert answer.get_json()["error"].startswith("option.pre_process_hook: ")
    assert message in answer.get_json()["error"]


def test_hooks_do_not_lift_the_limit_of_bodies(
    client: EngineClient, tokenizer: Tokenizer, helper: Helper
) -> None:
    app = create_app(
        client, tokenizer, make_options({"max_request_size": 10}), "demo", helper=helper,
        hooks=Hooks(pre_process_hook=with_default),
    )  # fmt: skip
    assert app.test_client().post("/invocations", json={"prompt": "a" * 9}).status_code == 413


def test_other_tasks_have_hooks_too(client: EngineClient) -> None:
    task = Task(kind="handler", name="model.py")
    app = create_task_app(client, Options(), "demo", task, hooks=Hooks(ping_hook=bare_ping))
    assert app.test_client().get("/ping").get_json() == {"status": "mine"}


class TestFiles:
    CODE = "async def a(request): return request\nasync def b(request, call_next): ...\nc = 1\n"

    @pytest.fixture(autouse=True)
    def _clean_modules(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(sys, "path", [*sys.path])
        yield
        sys.modules.pop("model", None)

    def test_aws_variables_name_functions(
        self, load: Load, tmp_path: Path, tokenizer_dir: Path
    ) -> None:
        (tmp_path / "model.py").write_text(self.CODE)
        (tmp_path / "middleware.py").write_text("import json\n" + self.CODE)
        variables = {
            "CUSTOM_PRE_PROCESS": "model:a",
            "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE": "middleware.py:b",
            "CUSTOM_FASTAPI_PING_HANDLER": f"{tmp_path}/middleware.py:a",
        }
        configuration = load(f"option.model_id={tokenizer_dir}", variables)
        prepared = prepare(configuration, tmp_path)
        assert prepared.hooks == {
            "ping_hook": f"{tmp_path}/middleware.py:a",
            "throttle_hook": f"{tmp_path}/middleware.py:b",
            "pre_process_hook": f"{tmp_path}/model.py:a",
        }
        hooks = load_hooks(prepared.hooks, "")
        assert hooks.post_process_hook is None
        assert hooks.ping_hook is not None
        assert hooks.ping_hook.__globals__ is hooks.throttle_hook.__globals__  # pyright: ignore

    @pytest.mark.parametrize(
        ("option", "text", "message"),
        [
            ("pre_process_hook", "package.module:f", "expected FILE.py:FUNCTION"),
            ("pre_process_hook", "model.py", "expected FILE.py:FUNCTION"),
            ("post_process_hook", "other.py:a", "there is no file other.py"),
            ("post_process_hook", "hooks.py:x", "has no such function"),
            ("throttle_hook", "hooks.py:c", r"expected async def f\(request, call_next\)"),
            ("ping_hook", "hooks.py:c", "expected a function"),
            ("ping_hook", "broken.py:a", "broken.py:2: ModuleNotFoundError.*requirements.txt"),
            ("ping_hook", "gone.py:a", "gone.py:2: CancelledError: why"),
            ("pre_process_hook", "hooks.py:a\noption.pre_post_process_hook=hooks.py:b",
             "leave one out"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_loaded(
        self, load: Load, tmp_path: Path, tokenizer_dir: Path, option: str, text: str, message: str
    ) -> None:
        (tmp_path / "hooks.py").write_text(self.CODE)
        (tmp_path / "broken.py").write_text("\nimport no_such_thing\n")
        (tmp_path / "gone.py").write_text("import asyncio\nraise asyncio.CancelledError('why')\n")
        configuration = load(f"option.model_id={tokenizer_dir}\noption.{option}={text}\n")
        with pytest.raises(ConfigurationError, match=message):
            prepare(configuration, tmp_path)

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("import {0}.sagemaker as s\n@s.custom_ping_handler\nasync def f(r): ...\n",
             "model.py:2: custom_ping_handler.*option.ping_hook"),
            ("import {0}.sagemaker as s\n@s.custom_invocation_handler\nasync def f(r): ...\n",
             "write handle"),
            ("from {0}.common.fastapi.middleware import custom_middleware\n"
             "@custom_middleware('throttle')\nasync def f(r, n): ...\n", "option.throttle_hook"),
            ("from {0}.common.fastapi.middleware import input_formatter\n"
             "@input_formatter\nasync def f(r): ...\n", "option.pre_process_hook"),
            ("async def custom_sagemaker_ping_handler(): ...\n", "model.py:1.*option.ping_hook"),
        ],
    )  # fmt: skip
    def test_functions_that_aws_finds_without_an_option_are_refused(
        self, load: Load, tmp_path: Path, tokenizer_dir: Path, code: str, message: str
    ) -> None:
        (tmp_path / "model.py").write_text(code.format("model_hosting_container_standards"))
        with pytest.raises(ConfigurationError, match=message):
            prepare(load(f"option.model_id={tokenizer_dir}"), tmp_path)

    def test_an_invocation_handler_is_refused(self, load: Load) -> None:
        error = refusal(load, "", {"CUSTOM_FASTAPI_INVOCATION_HANDLER": "model:f"})
        assert "option.pre_post_process_hook" in error

    def test_the_check_says_what_is_wrong(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "hooks.py").write_text(self.CODE)
        assert check("", f"ping_hook={tmp_path}/hooks.py:a") == 0
        assert check("", f"ping_hook={tmp_path}/hooks.py:x") == 2
        assert "no such function" in capsys.readouterr().err
