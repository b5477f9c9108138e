"""The benchmark of speculation runs, and its given acceptance is what drafts get."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.speculation.__main__ import main
from kernels.cpu.shared_library import unavailable_reason

VLLM = """
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, max_tokens, **_): pass

class LLM:
    def __init__(self, speculative_config, **_):
        self.drafts, self.num_answers = speculative_config, 0

    def generate(self, prompts, params, use_tqdm):
        self.num_answers += len(prompts)

    def get_metrics(self):
        if self.drafts is None:
            return []
        per_answer = {"draft_tokens": self.drafts["num_speculative_tokens"], "accepted_tokens": 3}
        return [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=count * self.num_answers)
                for name, count in per_answer.items()]
"""


def test_gains_of_the_demo_model_and_of_vllm(tmp_path, capsys, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out, picture = tmp_path / "gains.json", tmp_path / "gains.svg"
    arguments = ["--users", "1,2", "--given", "0.5,1", "--tokens", "30", "--rounds", "1"]
    arguments += ["--peer-python", sys.executable]
    assert main([*arguments, "--dtype", "fp32", "--out", str(out)]) == 0
    assert "given 0.5    1 users:" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["command"].startswith("python -m benchmarks.speculation --users 1,2 --given 0.5,1")
    assert main(["--results", str(out), "--draw", str(picture)]) == 0
    assert capsys.readouterr().out == ""
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    for text in ("1 user", "decodes only", "6 rows a sequence", "ms"):
        assert f">{text}<" in drawn
    half, whole, repeats, edits, quotes, plain, *of_two, vllm, _ = found["gains"]
    assert [each["users"] for each in of_two] == [2] * 6
    assert (vllm["what"], vllm["users"], vllm["accepted"]) == ("vLLM", 1, 3 / 5)
    assert vllm["tokens_per_step"] == 30 / 27
    assert [half["what"], whole["what"]] == ["given 0.5", "given 1.0"]
    assert [each["what"] for each in (repeats, edits, quotes, plain)] == [
        "repeats", "edits", "quotes", "plain",
    ]  # fmt: skip
    assert half["accepted"] < whole["accepted"]
    if unavailable_reason() is None:
        assert whole["accepted"] == 1.0
        assert 3 < whole["tokens_per_step"] < 6, "one request at a time: a token and five drafts"
        assert whole["ideal"] > half["ideal"] >= 1.0


LLAMA_SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    sys.exit(print("version: 1 (a test)"))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["prompt"] and body["ignore_eos"]
        drafts = {{"draft_n": 8, "draft_n_accepted": 6}} if "--spec-type" in sys.argv else {{}}
        self.answer({{"tokens_predicted": body["n_predict"], "timings": drafts}})

    def answer(self, found):
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_draft_model_that_is_right_and_llama_cpp(tmp_path, capsys):
    out, server = tmp_path / "gains.json", tmp_path / "llama-server"
    server.write_text(LLAMA_SERVER.format(python=sys.executable))
    server.chmod(0o755)
    common = ["--users", "1,3", "--tokens", "30", "--rounds", "1", "--out", str(out)]
    assert main([*common, "--dtype", "fp32", "--draft-layers", "1", "--always"]) == 0
    for gain, users in zip(json.loads(out.read_text())["gains"], (1, 3), strict=True):
        assert (gain["what"], gain["users"]) == ("right", users)
        if unavailable_reason() is None:
            assert gain["accepted"] == 1.0
            assert gain["tokens_per_step"] > 4
    given = ["--given", "", "--dtype", "bf16", "--always", "--llama-server", str(server)]
    assert main([*common, *given]) == 0
    found = json.loads(out.read_text())
    assert found["versions"] == {"llama.cpp": "version: 1 (a test)"}
    copies = [gain for gain in found["gains"] if gain["what"] in ("edits", "quotes")]
    assert [gain["users"] for gain in copies] == [1, 1, 3, 3]
    for gain in copies:  # answers to any model, so no rounding counts
        assert 1.2 < gain["tokens_per_step"] < 6
        assert 0.4 < gain["accepted"] <= 1
    others = [gain for gain in found["gains"] if gain["what"].startswith("llama.cpp")]
    ways = ("llama.cpp ngram-simple", "llama.cpp ngram-cache")
    assert [(gain["what"], gain["users"]) for gain in others] == [
        (way, users) for users in (1, 3) for way in ways
    ]
    for gain in others:
        assert (gain["accepted"], gain["tokens_per_step"]) == (6 / 8, 30 / (30 - 6))
    assert "llama.cpp ngram-cache   3 users:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["nowhere", "--draft-layers", "2"],
            "nowhere: no directory with model.safetensors, and none of llama",
        ),
        (
            ["models/demo", "--draft-layers", "4"],
            "models/demo has 4 layers, so a draft model has 1 to 3",
        ),
    ],
)
def test_layers_that_cannot_draft_are_errors(arguments, problem):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert problem in str(raised.value)
