"""`python -m benchmarks.cpu.offline_peer MODEL WORK`: ours without a server, as `LLM` runs it.

Given all requests at once, of which as many run as there are users, like other offline systems:
what it gains over ours is what HTTP and its clients cost. Prints what it found as JSON.
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
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": work["users"],
        "kv_cache_memory_bytes": KV_GIB * 2**30,
        "enable_prefix_caching": False,  # the single user asks again what all have asked
    }
    with LLM(model_dir, **options) as llm:
        _rate(llm, [([0] * 8, 4)])
        start_s = time.perf_counter() - started
        many = _rate(llm, work["requests"])
        one_by_one = work["requests"][: work["requests_of_one"]]
        seconds = sum(length / _rate(llm, [(prompt, length)]) for prompt, length in one_by_one)
        one = sum(length for _, length in one_by_one) / seconds
    print(json.dumps({"tokens_per_s": many, "tokens_per_s_of_one": one, "start_s": start_s}))


def _rate(llm: LLM, requests: list[tuple[list[int], int]]) -> float:
    """Tokens per second; each prompt is of ids, with the number of tokens to answer."""
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in requests
    ]
    started = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / seconds


if __name__ == "__main__":
    main(*sys.argv[1:])
