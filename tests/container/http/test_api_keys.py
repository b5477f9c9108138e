"""API keys: the file, the two headers, and the limits of each key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from flask.testing import FlaskClient

from container.front_end.app import create_app
from container.multi_model.model_container import UnixConnection
from container.security.api_keys import ApiKey, find_api_key, read_api_keys
from container.security.authentication import Gate
from container.security.rate_limits import RateLimits
from container.wire.engine_client import EngineClient
from core.configuration.options import Options, make_options
from core.errors import ConfigurationError, RateLimitError
from core.protocol.launch import Launch
from core.protocol.messages import Submit
from core.text.tokenizer import Tokenizer
from tests.clock import Clock
from tests.container.fake_engine import FakeEngine, fails
from tests.container.processes import HANG_S, children, running, stopped, wait_until

BODY = {"inputs": "Q", "parameters": {"max_new_tokens": 2}}
Guarded = Callable[[str], FlaskClient]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys_of(tmp_path: Path) -> Callable[[str], tuple[ApiKey, ...]]:
    def read(text: str) -> tuple[ApiKey, ...]:
        path = tmp_path / "keys"
        path.write_text(text)
        return read_api_keys(path)

    return read


@pytest.fixture
def guarded(
    client: EngineClient,
    tokenizer: Tokenizer,
    keys_of: Callable[[str], tuple[ApiKey, ...]],
    clock: Clock,
) -> Guarded:
    """Return a function that makes a client of an application whose key file has a given text."""

    def make(text: str) -> FlaskClient:
        keys = keys_of(text)
        gate = Gate(keys, limits=RateLimits(keys, clock))
        return create_app(client, tokenizer, Options(), "demo", gate=gate).test_client()

    return make


def test_a_key_in_either_header_is_admitted(guarded: Guarded, engine: FakeEngine) -> None:
    """And the engine learns its name, for receipts."""
    http = guarded("first-key\nsecond-key name=b\n")
    for headers in (
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer  second-key"},
        {"x-api-key": "second-key"},
        {"Authorization": "AWS4-HMAC-SHA256 Credential=x", "X-Api-Key": "first-key"},
    ):
        assert http.post("/invocations", json=BODY, headers=headers).status_code == 200
    first, second, third, fourth = (
        submit.api_key for submit in engine.of_type(Submit) if isinstance(submit, Submit)
    )
    assert (second, third) == ("b", "b")
    assert first == fourth != ""


def test_the_live_page_needs_no_key_but_its_events_do(guarded: Guarded) -> None:
    http = guarded("first-key\n")
    for path in ("/", "/ui/page.css"):
        assert http.get(path).status_code == 200
    assert http.get("/ui/events").status_code == 401
    assert http.post("/", json=BODY).status_code == 401, "POST / generates text, as in TGI"
    assert http.options("/v1/chat/completions").status_code == 200, "browsers send it without a key"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": "Bearer "},
        {"x-api-key": "wrong\xe9"},
        {"x-api-key": "FIRST-KEY"},
    ],
)
def test_every_other_request_is_refused(guarded: Guarded, headers: dict[str, str]) -> None:
    http = guarded("first-key\n")
    for method, path in (
        ("POST", "/invocations"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/metrics"),
        ("GET", "/models"),
        ("GET", "/no/such/path"),
    ):
        response = http.open(path, method=method, headers=headers)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"].lower().startswith("bearer")
        error = response.get_json()["error"]
        message = error["message"] if path.startswith("/v1") else error
        assert message == (
            "the API key is missing or unknown; send 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'"
        )


def test_health_checks_need_no_key(guarded: Guarded) -> None:
    http = guarded("first-key\n")
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/health").status_code != 401


def test_requests_per_minute(guarded: Guarded, clock: Clock) -> None:
    http = guarded("limited-key name=one requests_per_minute=2\nother-key\n")
    one, other = {"x-api-key": "limited-key"}, {"x-api-key": "other-key"}

    def status() -> int:
        return http.post("/invocations", json=BODY, headers=one).status_code

    assert [status() for _ in range(3)] == [200, 200, 429]
    assert http.post("/invocations", json=BODY, headers=other).status_code == 200
    refused = http.post("/invocations", json=BODY, headers=one)
    assert refused.headers["Retry-After"] == "30"
    assert refused.get_json()["error"] == (
        "the key 'one' has used up its requests_per_minute=2; try again in 30 s"
    )
    clock.now += 30
    assert [status() for _ in range(2)] == [200, 429]
    clock.now += 3600
    assert [status() for _ in range(3)] == [200, 200, 429], "a bucket never holds more than 2"


def test_tokens_per_minute_count_the_prompt_and_the_answer(guarded: Guarded, clock: Clock) -> None:
    """Each request has one prompt token and two generated tokens.

    Two requests leave -2 of the 4 tokens. The limit adds a token every 15 s.
    """
    http = guarded("limited-key name=one tokens_per_minute=4\n")
    headers = {"x-api-key": "limited-key"}

    def status() -> int:
        return http.post("/invocations", json=BODY, headers=headers).status_code

    assert [status() for _ in range(3)] == [200, 200, 429]
    refused = http.post("/invocations", json=BODY, headers=headers)
    assert refused.headers["Retry-After"] == "45", "until -2 has become 1"
    clock.now += 31
    assert status() == 200
    assert status() == 429


def test_a_streamed_answer_is_counted_too(guarded: Guarded) -> None:
    http = guarded("limited-key tokens_per_minute=2\n")
    headers = {"x-api-key": "limited-key"}
    streamed = http.post("/invocations", json={**BODY, "stream": True}, headers=headers)
    assert len(streamed.get_data().splitlines()) == 2
    assert http.post("/invocations", json=BODY, headers=headers).status_code == 429


def test_a_request_that_the_engine_refuses_costs_no_tokens(
    guarded: Guarded, engine: FakeEngine
) -> None:
    http = guarded("limited-key tokens_per_minute=1\n")
    headers = {"x-api-key": "limited-key"}
    answering, engine.script = engine.script, fails("overloaded", "the queue is full")
    for _ in range(3):
        assert http.post("/invocations", json=BODY, headers=headers).status_code == 503
    engine.script = answering
    assert http.post("/invocations", json=BODY, headers=headers).status_code == 200
    assert http.post("/invocations", json=BODY, headers=headers).status_code == 429


def test_forked_workers_share_the_limits(clock: Clock) -> None:
    """The front end creates the limits, and then gunicorn forks its workers."""
    num_children, num_each = 4, 5000
    limit = num_children * num_each + 1
    limits = RateLimits([ApiKey(b"", "a", requests_per_minute=limit)], clock)
    start, all_forked = os.pipe()
    children = []
    for _ in range(num_children):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(all_forked)
                os.read(start, 1)  # until the parent closes its end
                for _ in range(num_each):
                    limits.admit(0)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    os.close(start)
    os.close(all_forked)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * num_children
    limits.admit(0)
    with pytest.raises(RateLimitError):
        limits.admit(0)


def test_the_key_file(keys_of: Callable[[str], tuple[ApiKey, ...]]) -> None:
    keys = keys_of(
        "# for the batch jobs\n\nkey-of-a name=a requests_per_minute=5\n"
        "key-of-b tokens_per_minute=7  # a comment\n"
    )
    assert [(key.requests_per_minute, key.tokens_per_minute) for key in keys] == [
        (5, None),
        (None, 7),
    ]
    assert keys[0].name == "a"
    assert re.fullmatch("[0-9a-f]{8}", keys[1].name), "a name of 8 hex digits is made up"
    assert (find_api_key(keys, "key-of-b"), find_api_key(keys, "name=a")) == (1, None)
    assert "key-of" not in repr(keys)


def test_only_a_word_that_begins_with_a_hash_is_a_comment(
    keys_of: Callable[[str], tuple[ApiKey, ...]],
) -> None:
    (key,) = keys_of("abc#def name=b\n")
    assert key.name == "b"
    assert (find_api_key([key], "abc#def"), find_api_key([key], "abc")) == (0, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        ("secret name=a\nsecret name=b\n", "the same key is in two lines"),
        ("secret name=a\nother name=a\n", "the same name is in two lines"),
        ("\nsecret secret2\n", "line 2: word 2 is invalid"),
        ("secret rpm=3\n", "line 1: word 2 is invalid"),
        ("secret name=\n", "line 1: word 2 is invalid"),
        ("secret name=a name=b\n", "line 1: word 3 is invalid"),
        ("secret requests_per_minute=0\n", "requests_per_minute=0: expected an integer of at"),
        ("secrét\n", "line 1: a key may have only printable ASCII"),
        ("\ufeffsecret\n", "line 1: a key may have only printable ASCII"),
        ("secret\x1cother\n", "line 1: word 2 is invalid"),
        ("secret tokens_per_minute=many\n", "tokens_per_minute=many: expected an integer of at"),
    ],
)
def test_errors_name_the_line_but_never_a_key(
    keys_of: Callable[[str], tuple[ApiKey, ...]], text: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        keys_of(text)
    assert message in str(caught.value)
    assert "option.api_keys_file=" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file or directory"):
        read_api_keys(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot be read: it is not UTF-8 text"):
        read_api_keys(tmp_path / "binary")


def ask(path: Path, method: str, target: str, **headers: str) -> tuple[int, bytes]:
    connection = UnixConnection(path)
    try:
        connection.request(method, target, json.dumps(BODY) if method == "POST" else None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (FileNotFoundError, ConnectionRefusedError):
        return 0, b""
    finally:
        connection.close()


def test_a_model_among_several_checks_keys_and_limits_except_for_metrics(
    tmp_path: Path, short_dir: Path, tokenizer_dir: Path, engine: FakeEngine, endpoint: str
) -> None:
    """The server of several models checks the key for /metrics, and asks each model without a key.

    The model has two front-end workers. If they did not share the limit, they would admit a third
    request.
    """
    (tmp_path / "keys").write_text("the-only-key requests_per_minute=2\n")
    options = make_options({"http_workers": 2, "api_keys_file": str(tmp_path / "keys")})
    server = short_dir / "http.sock"
    launch = Launch(
        model_dir=str(tokenizer_dir),
        endpoint=endpoint,
        port=0,
        socket=str(server),
        name="one",
        options=options,
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    with running(["-m", "container.front_end.start", str(os.getpid()), str(path)]) as process:
        wait_until(lambda: engine.num_clients == 2)
        for worker in (workers := children(process.pid)):
            with stopped([other for other in workers if other != worker]):  # only `worker` answers
                wait_until(lambda: ask(server, "GET", "/ping")[0] == 200)
        assert len(workers) == 2
        assert ask(server, "GET", "/metrics")[0] == 200
        assert ask(server, "POST", "/invocations")[0] == 401
        key = {"x-api-key": "the-only-key"}
        statuses = [ask(server, "POST", "/invocations", **key)[0] for _ in range(6)]
        assert statuses == [200, 200, 429, 429, 429, 429]
        process.terminate()
        output, errors = process.communicate(timeout=HANG_S)
    assert "the-only-key" not in output + errors


def test_a_bad_file_ends_the_start(tmp_path: Path, tokenizer_dir: Path) -> None:
    launch = Launch(
        model_dir=str(tokenizer_dir),
        endpoint="ipc:///nowhere",
        port=0,
        socket=str(tmp_path / "http.sock"),
        options=make_options({"api_keys_file": "/no/such/keys"}),
    )
    path = tmp_path / "launch.json"
    path.write_bytes(msgspec.json.encode(launch))
    with running(["-m", "container.front_end.start", str(os.getpid()), str(path)]) as process:
        _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert errors == (
        "longshore: option.api_keys_file=/no/such/keys: cannot be read: No such file or directory\n"
    )
