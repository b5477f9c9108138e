"""Answers requests with vLLM's engine, for `benchmarks.speculation`.

Usage: `PEER_PYTHON -m benchmarks.speculation.vllm_peer WORK`. PEER_PYTHON is the interpreter of an
environment with vLLM and without this project's dependencies. WORK is a JSON file: the arguments of
vLLM's `LLM`, the length of answers, and for each case the prompts of its rounds, of which the first
is a warm-up. Prints a line of JSON: for each case the seconds of its rounds, and the numbers of
drafts and of right drafts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

COUNTS = ("draft_tokens", "accepted_tokens")


def main(work_file: str) -> None:
    work = json.loads(Path(work_file).read_text())
    llm = LLM(**work["options"], disable_log_stats=False)
    params = SamplingParams(temperature=0, max_tokens=work["tokens"], ignore_eos=True)
    found: list[dict[str, Any]] = []
    for first, *rounds in work["cases"]:
        llm.generate(first, params, use_tqdm=False)
        before = _counts(llm)
        seconds = [_seconds(llm, prompts, params) for prompts in rounds]
        counts = [now - then for now, then in zip(_counts(llm), before, strict=True)]
        found.append({"seconds": seconds, "counts": counts})
    print(json.dumps(found))


def _seconds(llm: Any, prompts: list[str], params: Any) -> float:
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def _counts(llm: Any) -> list[int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return [values.get(f"vllm:spec_decode_num_{name}", 0) for name in COUNTS]


if __name__ == "__main__":
    main(*sys.argv[1:])
