"""The benchmark of speculation runs, and its given acceptance is what drafts get."""

from __future__ import annotations

import json
import sys

from benchmarks.speculation import main
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
    arguments = ["--users", "1", "--given", "0.5,1", "--tokens", "30", "--rounds", "1"]
    arguments += ["--peer-python", sys.executable]
    assert main([*arguments, "--dtype", "fp32", "--out", str(out)]) == 0
    assert "given 0.5    1 users:" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["command"].startswith("python -m benchmarks.speculation --users 1 --given 0.5,1")
    assert main(["--results", str(out), "--draw", str(picture)]) == 0
    assert capsys.readouterr().out == ""
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    for text in ("1 user", "decodes only", "6 rows a sequence", "ms"):
        assert f">{text}<" in drawn
    half, whole, repeats, plain, vllm = found["gains"]
    assert (vllm["what"], vllm["users"], vllm["accepted"]) == ("vLLM", 1, 3 / 5)
    assert vllm["tokens_per_step"] == 30 / 27
    assert [half["what"], whole["what"]] == ["given 0.5", "given 1.0"]
    assert (repeats["what"], plain["what"]) == ("repeats", "plain")
    assert half["accepted"] < whole["accepted"]
    if unavailable_reason() is None:
        assert whole["accepted"] == 1.0
        assert whole["ideal"] > half["ideal"] >= 1.0
