"""Measure what checkpoints of states gain: prompt tokens found, and times to the first token.

A model of LFM2's kind with random weights answers one request after the other, in turns:

    chat      8 conversations of three turns: a system prompt of 256 tokens that all share, 48 more
              in each turn, answers of 32
    system    16 requests that share a system prompt of 512 tokens, with 48 tokens of their own

    OMP_NUM_THREADS=1 python -m benchmarks.engine.checkpoints
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from core.sampling import SamplingParams
from engine.engine import Engine
from engine.offline.llm import LLM

CONFIG = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "full_attn_idxs": [2, 5],
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
NUM_OWN, NUM_ANSWER = 48, 32


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token of an answer, and the whole answer."""
    params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER, ignore_eos=True)
    begin, first = time.monotonic(), 0.0
    engine.add(prompt, params, begin)
    answer: list[int] = []
    while engine.has_work():
        for output in engine.step(time.monotonic()):
            first = first or time.monotonic() - begin
            answer += output.token_ids
    return first, answer


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, CONFIG["vocab_size"]) for _ in range(count)]


def chat(engine: Engine, rng: random.Random) -> Iterator[float]:
    system = tokens(rng, 256)
    conversations = [[*system] for _ in range(8)]
    for _ in range(3):
        for conversation in conversations:
            conversation += tokens(rng, NUM_OWN)
            seconds, answer = first_token(engine, conversation)
            conversation += answer
            yield seconds


def shared_system(engine: Engine, rng: random.Random) -> Iterator[float]:
    system = tokens(rng, 512)
    for _ in range(16):
        yield first_token(engine, [*system, *tokens(rng, NUM_OWN)])[0]


WORKLOADS = {"chat": chat, "system": shared_system}


def measure(model: Path, workload: str, num_checkpoints: int) -> str:
    """Return a row of the table, of an engine that has just started."""
    options = {"dtype": "fp32", "load_format": "dummy", "max_rolling_batch_size": 8}
    with LLM(str(model), state_checkpoints=num_checkpoints, **options) as llm:
        engine = llm.llm_engine
        first_token(engine, tokens(random.Random(0), 300))
        queries, hits = engine.strategy.num_prefix_queries, engine.strategy.num_prefix_hits
        times = [*WORKLOADS[workload](engine, random.Random(1))]
        queries = engine.strategy.num_prefix_queries - queries
        hits = engine.strategy.num_prefix_hits - hits
    milliseconds = [1000 * seconds for seconds in sorted(times)]
    return (
        f"| {workload} | {num_checkpoints} | {hits / queries:.1%} | {median(milliseconds):,.0f} | "
        f"{sum(milliseconds) / len(milliseconds):,.0f} |"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.checkpoints")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[0, 2, 8, 32])
    counts: list[int] = parser.parse_args(arguments).checkpoints
    print("| workload | `state_checkpoints` | prompt tokens found | median ms | mean ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for workload in WORKLOADS:
            for count in counts:
                print(measure(Path(folder), workload, count), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
