"""Answers of `paged` under load, over HTTP, which `none` computes again with the same bits."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.container.processes import wait_until
from tests.e2e.serving import DEMO, IMAGE, ROOT, Container, serve

NUM_ANSWERS = int(os.environ.get("ANSWERS", "12"))
"""`make soak` asks for more."""
CROWDED = """option.batching=paged
option.dtype=fp32
option.max_rolling_batch_size=12
option.max_rolling_batch_prefill_tokens=48
option.num_kv_blocks=24
"""
"""Chunks of prompts, and too few blocks for all: requests are preempted."""
TEXTS = ("ROMEO:", "First Citizen:\nBefore we proceed any further, hear me speak. " * 3, "KING")


def requests() -> list[tuple[str, dict]]:
    """Return requests of each API that shows log-probabilities: greedy ones, and sampled ones."""
    rng = random.Random(0)
    found = []
    for number in range(NUM_ANSWERS):
        text = rng.choice(TEXTS) + " " * rng.randrange(3)
        how = rng.choice(({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": number}))
        common = {**how, "max_tokens": rng.randrange(60, 120)}
        completion = {"prompt": text, "logprobs": 2, "echo": rng.random() < 0.3, **common}
        chat = {"messages": [{"role": "user", "content": text}], "logprobs": True, **common}
        how["do_sample"] = how["temperature"] > 0
        parameters = {"max_new_tokens": common["max_tokens"], "details": True, **how}
        found += [
            ("/v1/completions", completion),
            ("/v1/chat/completions", {**chat, "top_logprobs": 1}),
            ("/invocations", {"inputs": text, "parameters": parameters}),
        ]
    return found[:NUM_ANSWERS]


def answered(server: Container, url: str, body: dict) -> dict:
    status, data = server.request("POST", url, body)
    assert status == 200, data
    return {"url": url, "request": body, "response": json.loads(data)}


def verify(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "container", "verify", *arguments, "--dtype", "fp32"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.skipif(IMAGE is not None, reason="runs the checkout's command")
def test_none_computes_the_answers_of_paged_again(tmp_path):
    with serve(tmp_path, CROWDED) as server, ThreadPoolExecutor(24) as pool:
        todo = requests()
        answers = list(pool.map(lambda request: answered(server, *request), todo))
        wait_until(lambda: server.metric("vllm:num_preemptions_total"))
    path = tmp_path / "answers.jsonl"
    changed = json.loads(json.dumps(answers[0]))
    changed["response"]["choices"][0]["logprobs"]["token_logprobs"][-1] *= 1 + 1e-7
    lines = [*answers, changed, {**answers[0], "digest": "aa.int8"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    done = verify(str(DEMO), str(path))
    outcomes = [line for line in done.stdout.splitlines() if str(path) in line]
    assert done.returncode == 2, done.stderr
    assert [line for line in outcomes[:-2] if ": equal" not in line] == []
    assert len(outcomes) == NUM_ANSWERS + 2
    last = len(answers[0]["response"]["choices"][0]["logprobs"]["tokens"])
    assert f"differs at token {last}: choices[0].logprobs.token_logprobs" in outcomes[-2]
    assert "was computed otherwise: the weights (aa then" in outcomes[-1]
