"""Times calls of one system that embeds texts.

Usage: `python calls.py SYSTEM MODEL WORK`. WORK: the JSON file of `benchmarks.embeddings`. Prints
the results as JSON. Another system's environment has none of this project's dependencies, so they
are imported only to measure our own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Vectors = list[list[float]]


def make_longshore(model: str, dtype: str) -> Callable[[list[str]], Vectors]:
    from engine import LLM

    llm = LLM(model, device="cpu", dtype=dtype)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def make_sentence_transformers(model: str, dtype: str) -> Callable[[list[str]], Vectors]:
    import torch
    from sentence_transformers import (  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
    )

    kwargs = {"dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]}
    encoder: Any = SentenceTransformer(model, device="cpu", model_kwargs=kwargs)
    return lambda texts: encoder.encode(texts, show_progress_bar=False).tolist()


SYSTEMS = {"longshore": make_longshore, "sentence-transformers": make_sentence_transformers}


def main(system: str, model: str, work_file: str) -> None:
    work = json.loads(Path(work_file).read_text())
    embed = SYSTEMS[system](model, work["dtype"])
    texts: list[str] = work["texts"]
    vectors = embed(texts[:8])  # warms up, too
    seconds = {size: _seconds(embed, texts, size, work["seconds"]) for size in work["at_once"]}
    print(json.dumps({"vectors": vectors, "seconds": seconds}))


def _seconds(
    embed: Callable[[list[str]], Vectors], texts: list[str], size: int, seconds: float
) -> list[float]:
    """Return the time of each call with `size` texts, for about so many seconds."""
    taken: list[float] = []
    at = 0
    while sum(taken) < seconds:
        batch = [texts[(at + index) % len(texts)] for index in range(size)]
        at += size
        started = time.perf_counter()
        embed(batch)
        taken.append(time.perf_counter() - started)
    return taken


if __name__ == "__main__":
    main(*sys.argv[1:])
