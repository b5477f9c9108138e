"""The benchmark of the front end: the requests that it sends, and a run of it."""

from __future__ import annotations

import importlib
import sys
import time
from types import ModuleType, SimpleNamespace

import msgspec
import pytest

from benchmarks.front_end.__main__ import main
from benchmarks.front_end.cases import cases
from benchmarks.front_end.sampler import shares


def test_cases_take_their_time_at_their_rate():
    of_text = [*cases(["text"], [1, 100], rate=5000, flood=50_000, seconds=4, requests=9)]
    assert [case.name for case in of_text] == [
        "text, streams, 1",
        "text, streams, 100",
        "text, streams, 100, flood",
        "text, whole answers, 1",
        "text, whole answers, 100",
    ]
    assert [case.step_s for case in of_text] == [0.01, 0.02, 0.002, 0.01, 0.02]
    assert [case.tokens for case in of_text] == [400, 200, 2000, 400, 200]


def test_samples_are_shared_out_by_file():
    found = shares(
        {
            "/a/gevent/_socketcommon.py:SocketMixin.send": 5,
            "/a/gevent/hub.py:Hub.run": 1,
            "/a/core/text/detokenizer.py:Detokenizer.push": 2,
            "/a/asyncio/base.py:run": 2,
        }
    )
    assert {part: share for part, share in found.items() if share} == {
        "sending, receiving": 0.5,
        "event loop": 0.1,
        "detokenizing": 0.2,
        "other": 0.2,
    }


def test_a_run_measures_every_api(tmp_path, capsys):
    """With option.stream_delay, a chunk has several tokens."""
    out = tmp_path / "found.json"
    sizes = ["--connections", "3", "--seconds", "0.2", "--requests", "3", "--flood", "0"]
    assert main([*sizes, "--stream-delay", "70", "--out", str(out)]) == 0
    rows = msgspec.json.decode(out.read_bytes())["rows"]
    assert [row["name"] for row in rows] == [
        f"{api}, {kind}, 3"
        for api in ("text", "completions", "chat")
        for kind in ("streams", "whole answers")
    ]
    assert all(row["tokens_per_s"] > 0 and row["ping_p99_ms"] > 0 for row in rows)
    assert all(row["tokens_per_chunk"] > 2 for row in rows[::2])
    assert rows[0]["name"] in capsys.readouterr().out


def test_an_unknown_api_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--apis", "text,poetry"])
    assert "unknown API poetry" in capsys.readouterr().err


SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

given = dict(zip(sys.argv, sys.argv[1:]))
assert json.loads(given["--additional-config"])["token_ids"]
assert given["--max-num-seqs"] == "3"

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(b"")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        began = time.thread_time()
        while time.thread_time() < began + 0.03: pass
        if not body["stream"]:
            return self.answer(b"{}")
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for record in [b'data: {"a":1}\\n\\n'] * body["max_tokens"] + [b""]:
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(record), record))
    def answer(self, data):
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass

ThreadingHTTPServer(("127.0.0.1", int(given["--port"])), Handler).serve_forever()
"""


def test_vllm_s_server_takes_turns_with_ours(tmp_path, capsys):
    """A stand-in for it uses 30 ms of CPU time for a request."""
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(SERVER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "found.json"
    sizes = ["--connections", "3", "--seconds", "0.2", "--requests", "3", "--flood", "0"]
    peer = ["--vs", "vllm", "--peer-python", str(python)]
    assert main([*sizes, *peer, "--apis", "text,chat", "--out", str(out)]) == 0
    rows = {row["name"]: row for row in msgspec.json.decode(out.read_bytes())["rows"]}
    assert [*rows] == [
        "text, streams, 3",
        "text, whole answers, 3",
        "chat, streams, 3",
        "vllm: chat, streams, 3",
        "chat, whole answers, 3",
        "vllm: chat, whole answers, 3",
    ]
    assert rows["vllm: chat, streams, 3"]["tokens_per_chunk"] == 1
    assert rows["vllm: chat, whole answers, 3"]["request_us"] > 15_000
    assert capsys.readouterr().out.count("vllm:") == 2, "it takes no samples"


@pytest.fixture
def fake_executor(monkeypatch):
    """Return the class of the executor, which vLLM's environment imports, with stand-ins."""

    class Executor:
        def __init__(self, config):
            self.vllm_config = config
            self._init_executor()

    contents = {
        "executor.abstract": {"Executor": Executor},
        "kv_cache_interface": {"FullAttentionSpec": SimpleNamespace},
        "outputs": {"ModelRunnerOutput": SimpleNamespace},
    }
    for name in ("vllm", "vllm.v1", "vllm.v1.executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, f"vllm.v1.{name}", module)
    name = "benchmarks.front_end.vllm_executor"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).FakeExecutor
    sys.modules.pop(name)


def test_the_executor_of_vllm_waits_for_each_step(fake_executor, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    executor = fake_executor(SimpleNamespace(additional_config={"token_ids": [7, 8, 9]}))
    assert executor.collective_rpc("get_supported_tasks") == [("generate",)]
    assert executor.collective_rpc("compile_or_warm_up_model") == []
    params = SimpleNamespace(seed=30_000)
    new = [SimpleNamespace(req_id=id, sampling_params=params) for id in "ab"]
    none = SimpleNamespace(req_ids=[], num_output_tokens=[])
    known = SimpleNamespace(req_ids=["b", "a"], num_output_tokens=[4, 2])
    found = []
    for first, later in [(new, none), ([], known), ([], none)]:
        plan = SimpleNamespace(scheduled_new_reqs=first, scheduled_cached_reqs=later)
        output = executor.execute_model(plan, non_block=True).result()
        assert [*output.req_id_to_index] == output.req_ids
        found.append(dict(zip(output.req_ids, output.sampled_token_ids, strict=True)))
    assert found == [{"a": [7], "b": [7]}, {"b": [8], "a": [9]}, {}]
    assert slept == [pytest.approx(0.03), pytest.approx(0.06)]
