"""Every response format, byte by byte; tests/container/golden has a file per response.

`python -m pytest tests/container/test_golden.py --rewrite-golden` rewrites the files.
Review the diff.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from core.text.tokenizer import Tokenizer
from tests.container.conftest import EOS, Serve
from tests.container.fake_engine import FakeEngine, fails, says

GOLDEN = Path(__file__).parent / "golden"
TEXT = {"inputs": "Q"}
DETAILS = {**TEXT, "parameters": {"details": True, "decoder_input_details": True}}
STREAM = {**TEXT, "parameters": {"details": True}, "stream": True}
BATCH = {"inputs": ["Q", "", "x" * 100], "parameters": {"details": True}}
CHAT = {"messages": [{"role": "user", "content": "Q"}]}
TOOLS = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
PROMPT = {"prompt": ["Q", "R"], "max_tokens": 3}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SSE = {"output_formatter": "sse"}
TGI = {"tgi_compat": True}
ROLLING = {"rolling_batch": "vllm"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BEST = {**TEXT, "parameters": {"best_of": 2, "details": True, "max_new_tokens": 2}}
TOP = {
    "inputs": "Qu",
    "parameters": {
        "details": True,
        "top_n_tokens": 2,
        "max_new_tokens": 2,
        "decoder_input_details": True,
        "prompt_logprobs": 1,
    },
}
TOP_STREAM = {**TEXT, "parameters": {"top_n_tokens": 2, "max_new_tokens": 1}, "stream": True}
SCORED = {**PROMPT, "prompt": "Qu", "max_tokens": 2, "logprobs": 1, "echo": True}

SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text": ("/invocations", TEXT, {}),
    "text_full": ("/invocations", {**TEXT, "parameters": {"return_full_text": True}}, ROLLING),
    "text_details": ("/invocations", DETAILS, ROLLING),
    "text_jsonlines": ("/invocations", {**TEXT, "stream": True}, ROLLING),
    "text_jsonlines_details": ("/invocations", STREAM, ROLLING),
    "text_sse": ("/invocations", STREAM, {**SSE, **ROLLING}),
    "text_error": ("/invocations", {"inputs": 5}, ROLLING),
    "text_batch": ("/invocations", BATCH, ROLLING),
    "text_batch_jsonlines": ("/invocations", {**BATCH, "inputs": ["Q"], "stream": True}, ROLLING),
    "async": ("/invocations", TEXT, {}),
    "async_details": ("/invocations", DETAILS, {}),
    "async_best_of": ("/invocations", BEST, {"async_mode": True, **ROLLING}),
    "async_jsonlines": ("/invocations", {**TEXT, "stream": True}, {}),
    "async_jsonlines_details": ("/invocations", STREAM, {}),
    "async_sse": ("/invocations", STREAM, SSE),
    "tgi": ("/invocations", TEXT, TGI),
    "tgi_details": ("/invocations", DETAILS, TGI),
    "tgi_sse": ("/invocations", STREAM, TGI),
    "text_best_of": ("/invocations", BEST, ROLLING),
    "text_top_tokens": ("/invocations", TOP, ROLLING),
    "text_top_tokens_sse": ("/invocations", TOP_STREAM, {**SSE, **ROLLING}),
    "tgi_best_of": ("/invocations", BEST, TGI),
    "tgi_top_tokens": ("/invocations", TOP, TGI),
    "tgi_top_tokens_sse": ("/invocations", TOP_STREAM, TGI),
    "chat": (CHATS, CHAT, {}),
    "chat_n": (CHATS, {**CHAT, "n": 2}, {}),
    "chat_n_sse": (CHATS, {**CHAT, **WITH_USAGE, "n": 2, "max_tokens": 2}, {}),
    "chat_top_logprobs": (
        CHATS,
        {**CHAT, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0, "max_tokens": 1},
        {},
    ),
    "chat_logprobs": (CHATS, {**CHAT, "logprobs": True, "max_tokens": 1}, {}),
    "chat_sse": (CHATS, {**CHAT, **WITH_USAGE, "max_tokens": 2}, {}),
    "chat_jsonlines": ("/invocations", {**CHAT, "stream": True, "max_tokens": 1}, {}),
    "chat_error": (CHATS, {"messages": []}, {}),
    "completions": (COMPLETIONS, {**PROMPT, "logprobs": 0}, {}),
    "completions_n": (COMPLETIONS, {**PROMPT, "n": 2}, {}),
    "completions_n_sse": (COMPLETIONS, {**SCORED, **WITH_USAGE, "n": 2}, {}),
    "completions_logprobs": (COMPLETIONS, SCORED, {}),
    "completions_prompt_logprobs": (
        COMPLETIONS,
        {"prompt": "Qu", "max_tokens": 1, "prompt_logprobs": 2},
        {},
    ),
    "completions_sse": (COMPLETIONS, {**PROMPT, **WITH_USAGE, "prompt": "Q", "echo": True}, {}),
}
"""The path, the body and the options by the name of the golden file. `text_*` have the shape of
LMI's rolling batch, `async_*` that of its asynchronous mode."""


def body_of(response: Any) -> str:
    return re.sub(r'"created":\d+', '"created":0', response.get_data(as_text=True))


def check(name: str, response: Any, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{name}.txt"
    seen = f"{response.status_code} {response.mimetype}\n{body_of(response)}"
    if request.config.getoption("--rewrite-golden"):
        path.write_text(seen)
    assert seen == path.read_text()


def send(http: Any, path: str, body: object) -> Any:
    return http.post(path, json=body, headers={"X-Amzn-SageMaker-Inference-Id": "id"})


@pytest.mark.parametrize("name", SHAPES)
def test_response_format(
    serve: Serve,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    path, body, options = SHAPES[name]
    answers = [[*tokenizer.encode(text), EOS] for text in ("Hi there", "Ho!")]
    engine.script = says(*answers, per_step=100)
    check(name, send(serve(**options), path, body), request)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_format(
    serve: Serve,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    stream: bool,
    request: pytest.FixtureRequest,
) -> None:
    text = 'So: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine.script = says([*tokenizer.encode(text), EOS], per_step=100)
    response = send(serve(tool_call_parser="hermes"), CHATS, {**TOOLS, "stream": stream})
    check(f"chat_tools{'_sse' * stream}", response, request)


@pytest.mark.parametrize(
    ("name", "path", "body", "options"),
    [
        ("text_jsonlines_failed", "/invocations", STREAM, ROLLING),
        ("async_jsonlines_failed", "/invocations", STREAM, {}),
        ("tgi_sse_failed", "/invocations", STREAM, TGI),
        ("text_failed", "/invocations", TEXT, {}),
        (
            "text_batch_jsonlines_failed",
            "/invocations",
            {**BATCH, "inputs": ["Q"], "stream": True},
            ROLLING,
        ),
        ("chat_sse_failed", CHATS, {**CHAT, "stream": True}, {}),
        ("completions_failed", COMPLETIONS, PROMPT, {}),
    ],
)
def test_late_failure_format(
    serve: Serve,
    engine: FakeEngine,
    name: str,
    path: str,
    body: dict[str, Any],
    options: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    engine.script = fails("failed", "out of luck", after=[40])
    check(name, send(serve(**options), path, body), request)


def test_every_golden_file_is_used() -> None:
    source = Path(__file__).read_text()
    assert all(path.stem.removesuffix("_sse") in source for path in GOLDEN.glob("*.txt"))
