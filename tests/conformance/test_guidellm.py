"""guidellm, which measures a server with prompts of given lengths."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import SUITES

NUM_REQUESTS = 4
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]


def run(url: str, path: str, model_dir: Path, folder: Path) -> Any:
    """Run a benchmark of this route, and return its report."""
    report = folder / "report.json"
    backend = f"kind=openai_http,target={url},model=demo,request_format={path}"
    tokenizer = f"kind=huggingface_auto,model={model_dir}"
    subprocess.run(
        [SUITES / "bin/guidellm", "run", "--backend", backend, "--tokenizer", tokenizer,
         "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
         "--profile", "kind=concurrent,streams=2",
         "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
         "--output", f"kind=json,path={report}", "--disable-console"],
        cwd=folder, check=True,
    )  # fmt: skip
    return json.loads(report.read_text())


@pytest.mark.parametrize("path", PATHS)
def test_no_request_fails(url: str, path: str, model_dir: Path, tmp_path: Path) -> None:
    (benchmark,) = run(url, path, model_dir, tmp_path)["benchmarks"]
    requests = benchmark["requests"]
    assert (requests["errored"], requests["incomplete"]) == ([], [])
    assert [request["output_tokens"] for request in requests["successful"]] == [8] * NUM_REQUESTS
