"""Measure what checkpoints of states gain: prompt tokens found, and times to the first token.

A model with random weights answers one request after the other, in turns:

    chat      8 conversations of three turns: a system prompt of 256 tokens that all share, 48 more
              in each turn, answers of 32
    system    16 requests that share a system prompt of 512 tokens, with 48 tokens of their own

    OMP_NUM_THREADS=1 python -m benchmarks.engine.checkpoints
    OMP_NUM_THREADS=1 python -m benchmarks.engine.checkpoints --model qwen3_5 --checkpoints 0 32

A slot of the first model, of LFM2's kind, has 24 KiB; one of the second, of Qwen3.5's kind, 6 MiB.
Of checkpoints in slots so large, all but one are also measured on the host.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from core.configuration.batching import state_limit
from core.sampling import SamplingParams
from core.states.layout import layer_states, slot_bytes
from engine.engine import Engine
from engine.offline.llm import LLM

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "lfm2": SIZES
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "full_attn_idxs": [2, 5],
        "conv_L_cache": 3,
    },
    "qwen3_5": SIZES
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 64,
        "full_attention_interval": 4,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
}
LARGE_SLOT = 2**20
"""Bytes of a slot from which checkpoints are also measured on the host."""
NUM_RUNNING = 8
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
    return [rng.randrange(10, SIZES["vocab_size"]) for _ in range(count)]


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


def state_bytes(model: str) -> int:
    """Return the bytes of a slot in fp32."""
    return slot_bytes(layer_states(MODELS[model]), 4, 4)


def places(model: str, counts: list[int]) -> list[tuple[int, int]]:
    """Return the numbers of checkpoints to measure, on the device and on the host."""
    on_device = [(count, 0) for count in counts]
    if state_bytes(model) < LARGE_SLOT:
        return on_device
    return [*on_device, *((1, count - 1) for count in counts if count > 1)]


def measure(folder: Path, model: str, workload: str, on_device: int, on_host: int) -> str:
    """Return a row of the table, of an engine that has just started with a model of `folder`."""
    options: dict[str, Any] = {"state_checkpoints": on_device + on_host, "swap_space_gib": 4}
    if on_host:  # states take half of this memory, which has no room for more checkpoints
        options["kv_cache_memory_bytes"] = (
            2 * (state_limit(NUM_RUNNING) + on_device) * (state_bytes(model))
        )
    with LLM(
        str(folder),
        dtype="fp32",
        load_format="dummy",
        max_rolling_batch_size=NUM_RUNNING,
        **options,
    ) as llm:
        engine = llm.llm_engine
        settings = engine.settings
        assert settings is not None
        assert (settings.num_checkpoints, settings.num_host_checkpoints) == (on_device, on_host)
        first_token(engine, tokens(random.Random(0), 300))
        queries, hits = engine.strategy.num_prefix_queries, engine.strategy.num_prefix_hits
        times = [*WORKLOADS[workload](engine, random.Random(1))]
        queries = engine.strategy.num_prefix_queries - queries
        hits = engine.strategy.num_prefix_hits - hits
    milliseconds = [1000 * seconds for seconds in sorted(times)]
    return (
        f"| {workload} | {on_device} | {on_host} | {hits / queries:.1%} | "
        f"{median(milliseconds):,.0f} | {sum(milliseconds) / len(milliseconds):,.0f} |"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.checkpoints")
    parser.add_argument("--model", choices=[*MODELS], default="lfm2")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[0, 2, 8, 32])
    given = parser.parse_args(arguments)
    print("| workload | on the device | on the host | prompt tokens found | median ms | mean ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[given.model]))
        for workload in WORKLOADS:
            for place in places(given.model, given.checkpoints):
                print(measure(Path(folder), given.model, workload, *place), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
