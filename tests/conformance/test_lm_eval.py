"""lm-eval, which scores a model over HTTP: choices, perplexity and generated texts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PYTHON, ROOT, SUITES

TASKS = ROOT / "tests/conformance/tasks"
SCORE = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
def score(before, after):
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    tokens, start = torch.tensor(encode(before + after)), len(encode(before))
    logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return logprobs.gather(1, tokens[1:, None])[start - 1 :].sum().item()
with torch.inference_mode():
    print(json.dumps([score(*pair) for pair in json.load(sys.stdin)]))
"""
"""Prints, for each pair of texts, transformers' log-likelihood of the second after the first."""


@pytest.fixture(scope="module")
def samples(url: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all tasks, and return the samples of each."""
    out = tmp_path_factory.mktemp("lm_eval")
    settings = f"model=demo,base_url={url}/v1/completions,tokenizer={model_dir},max_length=4096"
    subprocess.run(
        [SUITES / "bin/lm_eval", "run", "--model", "local-completions", "--model_args", settings,
         "--tasks", "choose,write,perplexity", "--include_path", TASKS, "--output_path", out,
         "--log_samples"],
        cwd=TASKS, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(out)}, check=True,
    )  # fmt: skip
    return {path.name.split("_")[1]: list(_records(path)) for path in out.rglob("*.jsonl")}


def _records(path: Path) -> Iterator[Any]:
    return map(json.loads, path.read_text().splitlines())


def test_choices_have_the_log_likelihoods_of_transformers(samples: Any, model_dir: Path) -> None:
    """lm-eval asks for the log-likelihoods by `echo` with `logprobs`; five digits are compared."""
    pairs: list[Any] = []
    found: list[float] = []
    for sample in samples["choose"]:
        pairs += [list(arguments.values()) for arguments in sample["arguments"].values()]
        found += [float(answers[0][0]) for answers in sample["resps"]]
    scored = subprocess.run(
        [PYTHON, "-c", SCORE, model_dir], input=json.dumps(pairs), cwd=ROOT, check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert len(found) == 9
    assert found == pytest.approx(json.loads(scored.stdout), rel=1e-5)


def test_perplexity(samples: Any) -> None:
    assert len(samples["perplexity"]) == 3
    assert all(float(sample["resps"][0][0]) < 0 for sample in samples["perplexity"])


def test_texts_end_at_stop_strings(samples: Any) -> None:
    texts = [sample["resps"][0][0] for sample in samples["write"]]
    assert len(texts) == 3
    assert any(texts)
    assert not any("\n\n" in text or "ROMEO:" in text for text in texts)
