"""A model on two GPUs, as two ranks, against the same model on one. Skipped if there is only one.

Weights are random, so many logits are nearly equal, and different rounding changes some greedy
tokens. The first tokens of both are compared only because a wrong split would change nearly all.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine.engines import make_engine
from benchmarks.gpu.engine.steady_decode import SteadyDecode, has_room_for, lengths
from core.sampling import SamplingParams
from engine.engine import Engine

BATCHES = (50, 1)
TIMED_STEPS, WARM_UP_STEPS = 40, 3
FIRST = SamplingParams(temperature=0, max_tokens=1)
NUM_PROMPTS = 32


def run(bench: Bench) -> None:
    if bench.is_dry or torch.cuda.device_count() < 2:
        bench.note("left out: it needs two GPUs")
        return
    times: dict[int, dict[str, float]] = {batch: {} for batch in BATCHES}
    tokens: list[list[int]] = []
    for ranks in ("1", "2"):
        engine = make_engine(
            bench,
            batching="paged",
            max_rolling_batch_size=max(BATCHES),
            max_model_len=sum(lengths(bench)),
            tensor_parallel_degree=ranks,
        )
        try:
            tokens.append(_first_tokens(engine))
            for batch in BATCHES:
                if has_room_for(bench, engine, batch):
                    times[batch][f"{ranks} ranks"] = _step_us(bench, engine, batch)
        finally:
            engine.close()
    num_equal = sum(one == two for one, two in zip(*tokens, strict=True))
    for batch, us in times.items():
        bench.row(batch=batch, us=us, **{"first tokens equal": f"{num_equal}/{NUM_PROMPTS}"})


def _first_tokens(engine: Engine) -> list[int]:
    """Return the most likely token after each prompt."""
    ids = [engine.add([1 + row] * 40, FIRST, 0.0) for row in range(NUM_PROMPTS)]
    found: dict[int, int] = {}
    while engine.has_work():
        found |= {output.request_id: output.token_ids[0] for output in engine.step(0.0)}
    return [found[id] for id in ids]


def _step_us(bench: Bench, engine: Engine, batch: int) -> float:
    with SteadyDecode(bench, engine, batch) as decode:
        decode.run(WARM_UP_STEPS)
        return round(decode.run(TIMED_STEPS).seconds * 1e6, 1)
