"""Measures transformers' own `generate` offline.

Usage: `python -m benchmarks.cpu.transformers_peer MODEL WORK`. A batch has one
request per user. As in a Python handler, its prompts are padded to the longest, and it runs until
the longest output is complete. Prints the results as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.engine.generate import Serve, padded_batches
from benchmarks.load.workload import Request


def main(model_dir: str, work_file: str) -> None:
    started = time.perf_counter()
    work = json.loads(Path(work_file).read_text())
    requests = [Request(prompt, length) for prompt, length in work["requests"]]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, work["dtype"]))
    with padded_batches(model.eval(), work["users"]) as serve:
        serve([Request([0] * 8, 4)], float("inf"))
        start_s = time.perf_counter() - started
        all_users = _rate(serve, requests)
    with padded_batches(model, 1) as serve:
        one_user = _rate(serve, requests[: work["requests_of_one"]])
    print(
        json.dumps({"tokens_per_s": all_users, "tokens_per_s_of_one": one_user, "start_s": start_s})
    )


@torch.inference_mode()
def _rate(serve: Serve, requests: list[Request]) -> float:
    """Return output tokens per second, counting only those that the requests ask for."""
    journal = serve(requests, float("inf"))
    return sum(request.max_tokens for request in requests) / (journal.end - journal.begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
