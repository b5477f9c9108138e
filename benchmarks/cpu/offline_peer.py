"""Measures our engine offline through `LLM`, without a server.

Usage: `python -m benchmarks.cpu.offline_peer MODEL WORK`. WORK: the JSON file
that `benchmarks.cpu.systems` writes. Prints the results as JSON.

Like the other offline systems, the engine gets all requests at once and runs as many at a time as
there are users. The difference from our server's result is the cost of HTTP and of the load test.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.cpu.systems import KV_GIB, MAX_LENGTH
from engine import LLM, SamplingParams
from engine.offline.prompts import TokensPrompt


def main(model_dir: str, work_file: str) -> None:
    started = time.perf_counter()
    work = json.loads(Path(work_file).read_text())
    options = {
        "batching": "paged",
        "dtype": work["dtype"],
        "quantize": work["quantize"],
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": work["users"],
        "kv_cache_memory_bytes": KV_GIB * 2**30,
        "enable_prefix_caching": False,  # the single user repeats prompts, which would be cached
    }
    with LLM(model_dir, **options) as llm:
        _rate(llm, [([0] * 8, 4)])
        start_s = time.perf_counter() - started
        all_users = _rate(llm, work["requests"])
        one_by_one = work["requests"][: work["requests_of_one"]]
        seconds = sum(length / _rate(llm, [(prompt, length)]) for prompt, length in one_by_one)
        one_user = sum(length for _, length in one_by_one) / seconds
    print(
        json.dumps({"tokens_per_s": all_users, "tokens_per_s_of_one": one_user, "start_s": start_s})
    )


def _rate(llm: LLM, requests: list[tuple[list[int], int]]) -> float:
    """Return the output tokens per second. requests: prompt token ids and output lengths."""
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in requests
    ]
    started = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return sum(len(result.outputs[0].token_ids) for result in results) / seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
