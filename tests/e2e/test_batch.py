"""The command `batch` with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import DEMO, IMAGE, ROOT


@pytest.mark.skipif(IMAGE is not None, reason="runs the checkout's command")
def test_a_batch_is_answered_by_the_model_of_its_properties(tmp_path: Path) -> None:
    requests = [
        ("/v1/completions", {"prompt": "ROMEO:", "max_tokens": 4, "temperature": 0}),
        ("/invocations", {"inputs": "ROMEO:", "parameters": {"max_new_tokens": 4}}),
        ("/v1/completions", {"prompt": "ROMEO:", "max_tokens": 0.5}),
    ]
    lines = [
        json.dumps({"custom_id": str(number), "url": url, "body": body})
        for number, (url, body) in enumerate(requests)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    properties = tmp_path / "serving.properties"
    properties.write_text("option.batching=none\noption.dtype=fp32\n")
    command = [sys.executable, "-m", "container", "batch", "--model-dir", str(DEMO)]
    command += ["--properties", str(properties), "--input", str(source), "--output", str(output)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "batching: none" in done.stdout
    assert "2 answered, 1 failed" in done.stdout
    outcomes = sorted(
        map(json.loads, output.read_text().splitlines()), key=lambda outcome: outcome["id"]
    )
    completion, text, refused = (outcome["response"] for outcome in outcomes)
    assert completion["body"]["choices"][0]["text"] == text["body"]["generated_text"] != ""
    assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "max_tokens")
